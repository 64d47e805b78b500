"""Plans from the files of other compilers: MSCCL's XML and MSCCL++'s JSON."""
