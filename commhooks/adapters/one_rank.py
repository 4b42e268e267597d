"""Make torch.distributed.checkpoint reject per-rank state, which it would deduplicate."""

from typing import Any, NoReturn

from commhooks.errors import CommHookStateError

__all__ = ["OfOneRank"]


class OfOneRank(set[int]):
    """The rank that a saved state belongs to: a set, which files hold as such.

    torch.distributed.checkpoint takes equal keys on several ranks for copies of one value, and
    would keep the state of one rank only. It asks each value how to write it.
    """

    def __create_write_items__(self, *_: Any) -> NoReturn:
        raise CommHookStateError(
            "torch.distributed.checkpoint would keep the state of one rank, but each rank has its "
            "own. Pass it commhooks.integrations.checkpoint.HookState(handle) instead; or save the "
            "state on every rank with torch.save(handle.state_dict(), f'hook_{rank}.pt')"
        )

    def __reduce__(self) -> Any:
        return set, (list(self),)

    def __deepcopy__(self, _: Any) -> "OfOneRank":
        return self  # asynchronous saving copies values before it asks them
