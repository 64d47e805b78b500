"""docs/plans.md reads these files of MSCCL and MSCCL++: all-gathers between two ranks."""

import json
from pathlib import Path

import torch.distributed as dist

rank = dist.get_rank()

Path(f"pair{rank}.xml").write_text("""
<algo name="pair" nchunksperloop="2" nchannels="1" proto="Simple" ngpus="2" coll="allgather" inplace="1">
  <gpu id="0" i_chunks="1" o_chunks="2" s_chunks="0"><tb id="0" send="1" recv="1" chan="0">
    <step s="0" type="s" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    <step s="1" type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/></tb></gpu>
  <gpu id="1" i_chunks="1" o_chunks="2" s_chunks="0"><tb id="0" send="0" recv="0" chan="0">
    <step s="0" type="s" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    <step s="1" type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/></tb></gpu>
</algo>""")


def put(own: int) -> dict:
    """A rank that puts its chunk into the peer's output, signals, and waits for the peer's."""
    memory = {"channel_type": "memory", "channel_ids": [0]}
    source = {"type": "o", "index": own, "size": 1}
    into = {"buffer_id": 0, "index": own, "size": 1}
    buffers = [{"access_channel_type": "memory", "remote_buffer_ids": [0]}]
    block = {
        "id": 0,
        "remote_buffer_refs": buffers,
        "channels": [memory],
        "ops": [
            {"name": "put", **memory, "src_buff": [source], "dst_buff": [into]},
            {"name": "signal", **memory},
            {"name": "wait", **memory},
        ],
    }
    return {
        "id": own,
        "input_chunks": 1,
        "output_chunks": 2,
        "scratch_chunks": 0,
        "semaphores": [],
        "channels": [{"channel_type": "memory", "connected_to": [1 - own]}],
        "remote_buffers": [{"rank": 1 - own, "type": "o", "access_channel_types": ["memory"]}],
        "threadblocks": [block],
    }


made = {"name": "pair", "collective": "allgather", "protocol": "Simple", "inplace": True}
Path(f"pair{rank}.json").write_text(json.dumps(made | {"gpus": [put(0), put(1)]}))
