import pytest
import torch

from kvcache import KVCacheConfig, ReqHandle, ReqToTokenPool
from tests.helpers.kvcache.blocks import DEVICE

GOOD = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "size": 32, "dtype": torch.float16, "device": "cpu"}


def test_opt_13b_in_fp16_takes_819200_bytes_a_token() -> None:
    config = KVCacheConfig(
        num_layers=40, num_kv_heads=40, head_dim=128, size=2048, page_size=16, dtype=torch.float16, device="cpu"
    )
    assert config.bytes_per_token == 819_200
    assert config.nbytes == 819_200 * (2048 + 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 33}, "33 tokens, not a multiple of page_size 16; use 32 or 48"),
        ({"num_layers": 0}, "num_layers must be a whole number >= 1"),
        ({"page_size": 2.0}, "page_size must be a whole number"),
        ({"num_kv_heads": True}, "num_kv_heads"),
        ({"v_head_dim": 0}, "v_head_dim"),
        ({"size": 2**31, "page_size": 16}, "fewer than 2"),
        ({"dtype": torch.int32}, "int32 can't be stored; use one of"),
        ({"device": "nowhere"}, "'nowhere' is no device"),
    ],
)
def test_config_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(**(GOOD | changes))


def test_config_is_keyword_only_and_frozen() -> None:
    config = KVCacheConfig(**GOOD)
    with pytest.raises(AttributeError):
        config.size = 64  # type: ignore[misc]
    with pytest.raises(TypeError):
        KVCacheConfig(2, 1, 8)  # type: ignore[misc,call-arg]


def test_table_shape_and_padding_row() -> None:
    table = ReqToTokenPool(3, 5, DEVICE)
    assert table.req_to_token.shape == (4, 5)
    assert table.req_to_token.dtype == torch.int32
    handles = table.alloc([None, None, None])
    assert handles is not None
    assert sorted(h.row for h in handles) == [1, 2, 3]
    table.check_integrity()


def test_alloc_is_all_or_none_and_keeps_held_rows() -> None:
    table = ReqToTokenPool(3, 5, DEVICE)
    first = table.alloc([None, None])
    assert first is not None
    assert table.alloc([None, None]) is None
    assert table.available_size() == 1
    again = table.alloc([first[1], None, first[0]])
    assert again is not None
    assert (again[0], again[2]) == (first[1], first[0])
    assert table.available_size() == 0
    assert table.alloc([first[0]]) == [first[0]]
    table.check_integrity()


def test_stale_and_forged_handles_raise() -> None:
    table = ReqToTokenPool(1, 5, DEVICE)
    (old,) = table.alloc([None]) or []
    table.free(old)
    with pytest.raises(ValueError, match="stale"):
        table.free(old)
    (new,) = table.alloc([None]) or []
    assert new.row == old.row
    for wrong in (old, ReqHandle(0, 0), ReqHandle(-1, 0), ReqHandle(2, 0), ReqHandle(1, 9)):
        with pytest.raises(ValueError, match="stale"):
            table.row(wrong)
        with pytest.raises(ValueError, match="stale"):
            table.rows([new, wrong])
        with pytest.raises(ValueError, match="stale"):
            table.alloc([wrong])
    assert table.rows([new]).tolist() == [1]


def test_writes() -> None:
    table = ReqToTokenPool(2, 4, DEVICE)
    table.write((1, slice(0, 3)), torch.tensor([7, 8, 9], device=DEVICE))
    table.write((torch.tensor([2, 1]), torch.tensor([0, 3])), torch.tensor([5, 6], device=DEVICE))
    table.write_flat(torch.tensor([9, 11], device=DEVICE), torch.tensor([40, 41], dtype=torch.int32, device=DEVICE))
    assert table.req_to_token.tolist() == [[0, 0, 0, 0], [7, 8, 9, 6], [5, 40, 0, 41]]


def test_table_needs_rows_and_positions() -> None:
    for size, length in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least one row"):
            ReqToTokenPool(size, length, DEVICE)


def test_shortage_of_rows_names_the_request() -> None:
    table = ReqToTokenPool(2, 4, DEVICE)
    table.alloc([None])
    assert "request 5 needs 3 row(s) of the request table, 1 of 2 are free: 2 are missing" in table.shortage(
        "request 5", 3
    )


class WithState(ReqToTokenPool):
    """Requests that hold a state slot besides their row, of which there are fewer: what a hybrid pool does."""

    def __init__(self, size: int, states: int) -> None:
        super().__init__(size, 4, DEVICE)
        self.free_states = list(range(states, 0, -1))
        self.state = [0] * (size + 1)

    def _fits(self, count: int) -> bool:
        return super()._fits(count) and count <= len(self.free_states)

    def _take(self, count: int) -> list[ReqHandle]:
        handles = super()._take(count)
        for handle in handles:
            self.state[handle.row] = self.free_states.pop()
        return handles

    def _drop(self, row: int) -> None:
        self.free_states.append(self.state[row])
        self.state[row] = 0
        super()._drop(row)


def test_a_pool_with_more_than_rows_stays_all_or_none() -> None:
    table = WithState(4, 2)
    assert table.alloc([None, None, None]) is None
    assert (table.available_size(), table.free_states) == (4, [2, 1])
    handles = table.alloc([None, None])
    assert handles is not None
    kept = list(table.state)
    assert table.alloc([*handles]) == handles
    assert table.alloc([handles[0], None]) is None
    assert table.state == kept
    table.free(handles[0])
    with pytest.raises(ValueError, match="stale"):
        table.free(handles[0])
    assert table.free_states == [1]
    table.check_integrity()
