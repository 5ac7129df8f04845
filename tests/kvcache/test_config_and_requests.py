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


def test_config_refuses() -> None:
    for changes, message in (
        ({"size": 33}, "33 tokens, not a multiple of page_size 16; use 32 or 48"),
        ({"num_layers": 0}, "num_layers must be a whole number >= 1"),
        ({"page_size": 2.0}, "page_size must be a whole number"),
        ({"num_kv_heads": True}, "num_kv_heads"),
        ({"v_head_dim": 0}, "v_head_dim"),
        ({"size": 2**31, "page_size": 16}, "fewer than 2"),
        ({"dtype": torch.int32}, "int32 can't be stored; use one of"),
        ({"device": "nowhere"}, "'nowhere' is no device"),
    ):
        with pytest.raises(ValueError, match=message):
            KVCacheConfig(**(GOOD | changes))


def test_alloc_is_all_or_none_and_keeps_held_rows() -> None:
    table = ReqToTokenPool(3, 5, DEVICE)
    assert (table.req_to_token.shape, table.req_to_token.dtype) == ((4, 5), torch.int32)
    first = table.alloc([None, None])
    assert first is not None
    assert table.alloc([None, None]) is None
    assert table.available_size() == 1
    again = table.alloc([first[1], None, first[0]])
    assert again is not None
    assert (again[0], again[2]) == (first[1], first[0])
    assert sorted(h.row for h in again) == [1, 2, 3]  # row 0 is padding
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


def test_what_is_wrong_is_named() -> None:
    for size, length in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least one row"):
            ReqToTokenPool(size, length, DEVICE)
    table = ReqToTokenPool(2, 4, DEVICE)
    table.alloc([None])
    shortage = table.shortage("request 5", 3)
    assert "request 5 needs 3 row(s) of the request table, 1 of 2 are free: 2 are missing" in shortage
