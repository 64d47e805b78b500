"""The pass behind :mod:`overlap_torch.inductor`: finds GEMMs beside functional collectives and puts the ops there.

``layouts`` follows how a tensor's dims are rearranged, ``editing`` reads and writes graphs, ``products`` knows GEMMs, and
``walks`` follows gathered tensors. ``gathers`` and ``reductions`` find the two kinds of pairs, ``fusion`` is the whole pass
over a graph, and ``report`` is its record.
"""

import hashlib
from pathlib import Path

# Part of the keys of compiled graphs: a hash of the passes' sources.
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()
