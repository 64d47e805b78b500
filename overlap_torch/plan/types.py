"""The parts of plans, problems and explanations, and their limits."""

from overlap_torch._plan import (
    BAND_ROWS,
    MAX_BAND_RUNS,
    MAX_CHUNKS,
    BandRun,
    Chunk,
    Collective,
    DType,
    Engine,
    Invariance,
    Kernel,
    Layout,
    Memory,
    Op,
    Prediction,
    Recipe,
    Resources,
    Schedule,
    Transport,
    Way,
)
from overlap_torch.plan._explain import Explanation

__all__ = [
    "BAND_ROWS", "MAX_BAND_RUNS", "MAX_CHUNKS", "BandRun", "Chunk", "Collective", "DType", "Engine",
    "Explanation", "Invariance", "Kernel", "Layout", "Memory", "Op", "Prediction", "Recipe",
    "Resources", "Schedule", "Transport", "Way",
]  # fmt: skip
