# Types of the planner's module, csrc/binding/plan_module.cc: what overlap_torch.plan exports or uses.
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from overlap_torch._explain import Explanation

MAX_CHUNKS: int
MAX_TRANSFERS: int
BAND_ROWS: int
MAX_BAND_RUNS: int

class _Enum:
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Op(_Enum):
    __members__: ClassVar[dict[str, Op]]
    GEMM_ALLREDUCE: ClassVar[Op]
    GEMM_REDUCESCATTER: ClassVar[Op]
    ALLGATHER_GEMM: ClassVar[Op]
    GEMM_ALLTOALL: ClassVar[Op]

class DType(_Enum):
    __members__: ClassVar[dict[str, DType]]
    BFLOAT16: ClassVar[DType]
    FLOAT16: ClassVar[DType]
    FLOAT32: ClassVar[DType]
    FLOAT64: ClassVar[DType]
    FLOAT8_E4M3FN: ClassVar[DType]
    FLOAT8_E5M2: ClassVar[DType]

class Recipe(_Enum):
    __members__: ClassVar[dict[str, Recipe]]
    NONE: ClassVar[Recipe]
    TENSOR_WISE: ClassVar[Recipe]
    ROW_WISE: ClassVar[Recipe]
    BLOCK_WISE: ClassVar[Recipe]

class Schedule(_Enum):
    __members__: ClassVar[dict[str, Schedule]]
    SEQUENTIAL: ClassVar[Schedule]
    OVERLAPPED: ClassVar[Schedule]

class Kernel(_Enum):
    __members__: ClassVar[dict[str, Kernel]]
    LIBRARY: ClassVar[Kernel]
    SM80: ClassVar[Kernel]
    SM90_PINGPONG: ClassVar[Kernel]
    SM90_COOPERATIVE: ClassVar[Kernel]
    SM90_PINGPONG_WIDE: ClassVar[Kernel]

class Transport(_Enum):
    __members__: ClassVar[dict[str, Transport]]
    NCCL: ClassVar[Transport]
    GLOO: ClassVar[Transport]
    PEER: ClassVar[Transport]

class Collective(_Enum):
    __members__: ClassVar[dict[str, Collective]]
    ALL_REDUCE: ClassVar[Collective]
    EXCHANGE: ClassVar[Collective]
    REDUCE_SCATTER: ClassVar[Collective]
    ALL_GATHER: ClassVar[Collective]
    ALL_TO_ALL: ClassVar[Collective]
    RING: ClassVar[Collective]
    DIRECT: ClassVar[Collective]

class Layout(_Enum):
    __members__: ClassVar[dict[str, Layout]]
    ROW_MAJOR: ClassVar[Layout]
    PACKED: ClassVar[Layout]

class Memory(_Enum):
    __members__: ClassVar[dict[str, Memory]]
    PRODUCT: ClassVar[Memory]
    OUTPUT: ClassVar[Memory]
    INPUT: ClassVar[Memory]
    GATHERED: ClassVar[Memory]
    SCRATCH: ClassVar[Memory]

class Way(_Enum):
    __members__: ClassVar[dict[str, Way]]
    PUSH: ClassVar[Way]
    PULL: ClassVar[Way]
    COPY: ClassVar[Way]

class Engine(_Enum):
    __members__: ClassVar[dict[str, Engine]]
    ANY: ClassVar[Engine]
    COPY_ENGINE: ClassVar[Engine]
    SMS: ClassVar[Engine]
    NCCL: ClassVar[Engine]

class Problem:
    __fields__: ClassVar[dict[str, Any]]
    op: Op
    m: int
    n: int
    k: int
    dtype: DType
    world_size: int
    recipe: Recipe
    output_dtype: DType
    fast_accum: bool
    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        dtype: DType | str | torch.dtype = ...,
        world_size: int = 1,
        op: Op | str = ...,
        recipe: Recipe | str = ...,
        output_dtype: DType | str | torch.dtype | None = None,
        fast_accum: bool = False,
    ) -> None: ...
    @property
    def row_parts(self) -> int: ...

class Profile:
    @staticmethod
    def shipped() -> Profile: ...
    @staticmethod
    def load(path: str | Path) -> Profile: ...
    @staticmethod
    def parse(text: str, source: str = "<text>") -> Profile: ...
    @staticmethod
    def fields() -> dict[str, str]: ...
    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def made_by(self) -> str: ...
    @property
    def made_at(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def missing(self) -> tuple[str, ...]: ...
    def to_json(self) -> str: ...
    def __hash__(self) -> int: ...

class Machine:
    __fields__: ClassVar[dict[str, Any]]
    arch: int
    sm_count: int
    sm_gflops: float
    has_sm80_kernels: bool
    has_sm90_kernels: bool
    link_latency_us: float
    link_gbps: float
    windows: bool
    peer_gbps: float
    profile: Profile
    serial: bool
    def __init__(
        self,
        arch: int = 0,
        sm_count: int = 0,
        sm_gflops: float = 0.0,
        has_sm80_kernels: bool = False,
        has_sm90_kernels: bool = False,
        link_latency_us: float = 0.0,
        link_gbps: float = 0.0,
        windows: bool = False,
        peer_gbps: float = 0.0,
        profile: Profile = ...,
        serial: bool = False,
    ) -> None: ...

class Chunk:
    __fields__: ClassVar[dict[str, Any]]
    def __init__(self, tiles: int, transport: Transport = ..., max_ctas: int = 0) -> None: ...
    def __hash__(self) -> int: ...
    @property
    def tiles(self) -> int: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def max_ctas(self) -> int: ...

class BandRun:
    __fields__: ClassVar[dict[str, Any]]
    def __init__(self, tile_rows: int, count: int) -> None: ...
    def __hash__(self) -> int: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def count(self) -> int: ...

class Rectangle:
    __fields__: ClassVar[dict[str, Any]]
    def __init__(self, row: int, rows: int, column: int, columns: int) -> None: ...
    def __hash__(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def column(self) -> int: ...
    @property
    def columns(self) -> int: ...

class Region:
    __fields__: ClassVar[dict[str, Any]]
    def __init__(self, memory: Memory, rank: int, area: Rectangle) -> None: ...
    def __hash__(self) -> int: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def rank(self) -> int: ...
    @property
    def area(self) -> Rectangle: ...

class Transfer:
    __fields__: ClassVar[dict[str, Any]]
    def __init__(
        self,
        way: Way,
        reduces: bool,
        source: Region,
        destination: Region,
        by: Engine = ...,
        stream: int = 0,
        tiles: Sequence[Rectangle] = (),
        behind: Sequence[int] = (),
    ) -> None: ...
    def __hash__(self) -> int: ...
    @property
    def way(self) -> Way: ...
    @property
    def reduces(self) -> bool: ...
    @property
    def source(self) -> Region: ...
    @property
    def destination(self) -> Region: ...
    @property
    def by(self) -> Engine: ...
    @property
    def stream(self) -> int: ...
    @property
    def tiles(self) -> tuple[Rectangle, ...]: ...
    @property
    def behind(self) -> tuple[int, ...]: ...

class Program:
    __fields__: ClassVar[dict[str, Any]]
    scratch_rows: int
    def __init__(self, scratch_rows: int = 0, transfers: Sequence[Transfer] = ()) -> None: ...
    @property
    def transfers(self) -> tuple[Transfer, ...]: ...
    @transfers.setter
    def transfers(self, transfers: Sequence[Transfer]) -> None: ...

class Resources:
    __fields__: ClassVar[dict[str, Any]]
    comm_sms: int
    smem_pad_bytes: int
    window: bool
    finish_ctas: int
    lanes: int
    one_launch: bool
    low_priority: bool
    def __init__(
        self,
        comm_sms: int = 0,
        smem_pad_bytes: int = 0,
        window: bool = False,
        finish_ctas: int = 0,
        lanes: int = 1,
        one_launch: bool = False,
        low_priority: bool = False,
    ) -> None: ...

class Plan:
    __fields__: ClassVar[dict[str, Any]]
    problem: Problem
    schedule: Schedule
    kernel: Kernel
    tile_m: int
    tile_n: int
    cluster_m: int
    layout: Layout
    collective: Collective
    resources: Resources
    program: Program
    def __init__(self) -> None: ...
    @property
    def bands(self) -> tuple[BandRun, ...]: ...
    @bands.setter
    def bands(self, bands: Sequence[BandRun]) -> None: ...
    @property
    def chunks(self) -> tuple[Chunk, ...]: ...
    @chunks.setter
    def chunks(self, chunks: Sequence[Chunk]) -> None: ...
    @property
    def tiles_m(self) -> int: ...
    @property
    def tiles_n(self) -> int: ...
    def tile_coord(self, index: int) -> tuple[int, int]: ...
    def tile_index(self, row: int, column: int) -> int: ...
    def part_row(self, tile_row: int) -> tuple[int, int]: ...
    def tile_chunk(self, index: int) -> int: ...
    def packed_offset(self, index: int) -> int: ...
    def chunk_extent(self, chunk: int) -> tuple[int, int]: ...
    def chunk_rows(self, chunk: int) -> tuple[int, int]: ...
    def buffer_elements(self) -> int: ...
    def validate(self) -> None: ...
    def encode(self) -> list[int]: ...
    def copy(self) -> Plan: ...
    def explain(
        self,
        machine: Machine | None = None,
        *,
        rank: int = 0,
        send_rows: Sequence[int] = (),
        receive_rows: Sequence[int] = (),
    ) -> Explanation: ...
    def plot(
        self,
        path: str | Path,
        machine: Machine | None = None,
        *,
        send_rows: Sequence[Sequence[int]] = (),
    ) -> None: ...

class KernelShape:
    def __init__(self, tile_m: int = 0, tile_n: int = 0, cluster_m: int = 1) -> None: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def cluster_m(self) -> int: ...

class Prediction:
    @property
    def gemm_us(self) -> float: ...
    @property
    def communication_us(self) -> float: ...
    @property
    def total_us(self) -> float: ...

class Price:
    @property
    def expected(self) -> Prediction: ...
    @property
    def steps(self) -> list[tuple[float, float]]: ...
    @property
    def computed_us(self) -> list[float]: ...

def kernel_shape(kernel: Kernel, on_cpu: bool = False) -> KernelShape: ...
def validate(plan: Plan, machine: Machine | None = None) -> None: ...
def usual_machine(plan: Plan) -> Machine: ...
def encode(plan: Plan) -> list[int]: ...
def decode(code: Sequence[int]) -> Plan: ...
def predict(plan: Plan, machine: Machine) -> Prediction: ...
def agree(
    machines: Sequence[Machine],
    nccl_versions: Sequence[int],
    builds: Sequence[int],
    serials: Sequence[int] = (),
) -> tuple[Machine, str, str]: ...
def serial_by(launch_blocking: str | None, maps: str, tracer: str) -> tuple[int, str]: ...
def candidates(problem: Problem, machine: Machine, all: bool = False) -> list[Plan]: ...
def make_plan_between(problem: Problem, machine: Machine) -> Plan: ...
def planning_us(problem: Problem, machine: Machine, repeats: int) -> float: ...
def kernel_candidates(
    problem: Problem,
    machine: Machine,
    tile: tuple[int, int],
    kernel_us: float,
    comm_sms: int = 0,
    chunks: int = 0,
) -> list[Plan]: ...
def make_kernel_plan(
    problem: Problem,
    machine: Machine,
    tile: tuple[int, int],
    kernel_us: float,
    comm_sms: int = 0,
    chunks: int = 0,
) -> Plan: ...
def price_kernel(plan: Plan, machine: Machine, kernel_us: float) -> Price: ...
def make_plan(problem: Problem, machine: Machine) -> Plan: ...
def needed_gain(plan: Plan, machine: Machine) -> tuple[float, float]: ...
def make_sequential(problem: Problem, machine: Machine) -> Plan: ...
def make_at_once(problem: Problem, kernel: Kernel) -> Plan: ...
def make_all_to_all(
    problem: Problem,
    kernel: Kernel,
    resources: Resources = ...,
    max_ctas: int = 0,
    transport: Transport = ...,
) -> Plan: ...
def make_row_panels(
    problem: Problem,
    kernel: Kernel,
    chunk_rows_of_tiles: Sequence[int],
    band_rows: int,
    resources: Resources = ...,
    max_ctas: int = 0,
    transport: Transport = ...,
    shape: KernelShape = ...,
) -> Plan: ...
def make_packed(
    problem: Problem,
    kernel: Kernel,
    chunk_tiles: Sequence[int],
    band_rows: int,
    resources: Resources = ...,
    max_ctas: int = 0,
    transport: Transport = ...,
    shape: KernelShape = ...,
) -> Plan: ...
def steps_text(
    plan: Plan,
    rank: int,
    machine: Machine,
    kernel_takes: bool = True,
    bias: bool = False,
    captured: bool = False,
    weights: Sequence[tuple[int, bool]] = ...,
    send_rows: Sequence[int] = ...,
    receive_rows: Sequence[int] = ...,
    longest_message: int = 0,
) -> str: ...
def kernel_steps_json(
    plan: Plan,
    rank: int,
    machine: Machine,
    awaits: bool = False,
    send_rows: Sequence[int] = ...,
    receive_rows: Sequence[int] = ...,
    pieces: int = 1,
) -> tuple[str, list[int], int]: ...
def steps_json(
    plan: Plan,
    rank: int,
    machine: Machine,
    kernel_takes: bool = True,
    bias: bool = False,
    captured: bool = False,
    weights: Sequence[tuple[int, bool]] = ...,
    send_rows: Sequence[int] = ...,
    receive_rows: Sequence[int] = ...,
    longest_message: int = 0,
) -> str: ...
def price_steps(
    plan: Plan,
    rank: int,
    machine: Machine,
    kernel_takes: bool = True,
    bias: bool = False,
    captured: bool = False,
    weights: Sequence[tuple[int, bool]] = ...,
    send_rows: Sequence[int] = ...,
    receive_rows: Sequence[int] = ...,
    longest_message: int = 0,
) -> Price: ...
def find_fault(
    plan: Plan,
    machine: Machine,
    kernel_takes: Sequence[bool],
    bias: bool = False,
    weights: Sequence[tuple[int, bool]] = ...,
    rows: Sequence[Sequence[int]] = ...,
    longest_message: int = 0,
) -> str: ...
def structures(
    plan: Plan,
    machine: Machine,
    kernel_takes: Sequence[bool],
    bias: bool = False,
    weights: Sequence[tuple[int, bool]] = ...,
    rows: Sequence[Sequence[int]] = ...,
    longest_message: int = 0,
) -> list[tuple[int, int]]: ...
def communication(
    plan: Plan,
    machine: Machine,
    kernel_takes: Sequence[bool],
    bias: bool = False,
    weights: Sequence[tuple[int, bool]] = ...,
    rows: Sequence[Sequence[int]] = ...,
    longest_message: int = 0,
) -> list[str]: ...
def unnoticed(
    plan: Plan,
    machine: Machine,
    kernel_takes: Sequence[bool],
    rank: int,
    work: bool = False,
    bias: bool = False,
    weights: Sequence[tuple[int, bool]] = ...,
    rows: Sequence[Sequence[int]] = ...,
    longest_message: int = 0,
) -> tuple[int, list[tuple[int, str, bool]]]: ...
def find_fault_in_a_row(
    plans: Sequence[Plan], machine: Machine, kernel_takes: Sequence[bool]
) -> str: ...
