"""The code of the pages about Accelerate and Transformers runs as it is shown."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from support import torchrun
from support.pages import run_page
from torch import Tensor, nn

import commhooks


class Model(nn.Module):
    """Returns a loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(40, 40)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(inputs).square().mean()}


def follow(rank: int, size: int, folder: Path) -> None:
    rows = [torch.randn(40) for _ in range(24)]
    pages: dict[str, tuple[int, dict[str, Any]]] = {
        "accelerate": (2, {"net": nn.Linear(40, 40), "data": [row[None] for row in rows]}),
        "transformers": (1, {"model": Model(), "data": [{"inputs": row} for row in rows]}),
    }
    torchrun.set_environment(rank, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(dist, "init_process_group", lambda backend: None)  # there is one
        for page, (count, namespace) in pages.items():
            names = {"torch": torch, **namespace}
            assert run_page(f"integrations/{page}.md", folder / page, names) == count
            handle = commhooks.handle_of(names["model"])
            assert handle is not None
            AcceleratorState._reset_state(True)
    assert {path.name for path in (folder / "accelerate/checkpoint").glob("commhooks*")} == {
        f"commhooks_{rank}.pt" for rank in range(size)
    }
    assert (folder / "transformers/run/checkpoint-2" / f"commhooks_{rank}.pt").exists()


@pytest.mark.filterwarnings("ignore")  # those of the packages
def test_pages(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(follow, 2, tmp_path, timeout=240)
