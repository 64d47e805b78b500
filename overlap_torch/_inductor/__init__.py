"""The pass behind :mod:`overlap_torch.inductor`: finds GEMMs beside functional collectives and puts the ops there.

``layouts`` follows how a tensor's dims are rearranged, ``editing`` reads and writes graphs, ``products`` knows GEMMs, and
``walks`` follows gathered tensors. ``gathers`` and ``reductions`` find the two kinds of pairs, ``fusion`` is the whole pass
over a graph, and ``report`` is its record.
"""
