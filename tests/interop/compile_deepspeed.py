"""Have DeepSpeed build what it needs on a CPU, into TORCH_EXTENSIONS_DIR."""

import os
import tempfile


def main() -> None:
    """Meet a process group of one rank, which is when DeepSpeed compiles."""
    import deepspeed
    import torch.distributed as dist

    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        raise SystemExit("Set TORCH_EXTENSIONS_DIR to a folder of the environment, as make interop does.")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
