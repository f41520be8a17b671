"""Pages leave the device and come back as they were, whole and in parts."""

import pytest
import torch

from m3agent.model import KVPages
from m3agent.runtime.kv.layout import export_page, import_page, part_names
from tests.runtime.tiny import CONFIG, TEXT


def filled(dtype: torch.dtype = torch.float32) -> KVPages:
    pages = KVPages.allocate(CONFIG, 4, dtype)
    for tensors in (pages.k, pages.v, pages.ik):
        for tensor in tensors:
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape))
    return pages


def rows(pages: KVPages, page: int) -> list[torch.Tensor]:
    return [x[page] for tensors in (pages.k, pages.v, pages.ik) for x in tensors if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_comes_back_as_it_was(dtype: torch.dtype) -> None:
    source, target = filled(dtype), filled(dtype)
    others = [row.clone() for row in rows(target, 2)]
    payload = export_page(source, 1)
    assert sum(part.nbytes for part in payload.values()) == KVPages.bytes_per_page(CONFIG, dtype)
    before = [row.clone() for row in rows(source, 1)]
    for row in rows(source, 1):
        row.zero_()  # the payload is a copy
    import_page(target, 3, payload)
    assert all(torch.equal(a, b) for a, b in zip(rows(target, 3), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rows(target, 2), others, strict=True))


def test_parts_are_named_in_the_order_of_need_and_come_alone() -> None:
    source, target = filled(), filled()
    payload = export_page(source, 0)
    assert list(payload) == part_names(source) == ["ik", "full", "kv.1", "kv.2"]
    assert payload["ik"].shape == (2, TEXT.block_size, TEXT.index_dim)
    assert payload["full"].shape == (1, 2, TEXT.block_size, TEXT.num_key_value_heads, TEXT.head_dim)
    before = target.k[2][0].clone()
    import_page(target, 0, {"ik": payload["ik"], "kv.1": payload["kv.1"]}, ["ik", "kv.1"])
    assert torch.equal(target.k[1][0], source.k[1][0])
    assert torch.equal(target.ik[2][0], source.ik[2][0])
    assert torch.equal(target.k[2][0], before)


@pytest.mark.parametrize("damage", ["missing", "dtype", "shape"])
def test_payloads_of_other_models_are_refused(damage: str) -> None:
    pages = filled()
    payload = export_page(pages, 0)
    if damage == "missing":
        del payload["kv.2"]
    else:
        payload["kv.2"] = payload["kv.2"].half() if damage == "dtype" else payload["kv.2"][:1]
    with pytest.raises(ValueError, match=r"kv\.2"):
        import_page(pages, 0, payload)
