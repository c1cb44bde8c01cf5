from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from monograph.arena import capacity
from monograph.arena.capacity import capacity_error, check_capacity, device_free_nbytes
from monograph.errors import CapacityError

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.mark.parametrize(("need", "free"), [(0, 0), (5, 5), (4, 5), (1 << 60, None)])
def test_enough_passes(need: int, free: int | None) -> None:
    check_capacity(need, free)


def test_one_byte_short_is_refused() -> None:
    with pytest.raises(CapacityError, match="1 B short"):
        check_capacity(6, 5)


def test_the_error_names_need_free_and_the_way_out() -> None:
    with pytest.raises(CapacityError) as caught:
        check_capacity(16 * GIB, 10 * GIB, "the longest max_seq_len that fits is 81,920", device="cuda:0")
    assert str(caught.value) == (
        "arena needs 16.0 GiB (17,179,869,184 bytes), 10.0 GiB (10,737,418,240 bytes) is free on cuda:0, 6.0 GiB "
        "short; the longest max_seq_len that fits is 81,920"
    )
    assert isinstance(caught.value, MemoryError)


def test_an_error_without_a_hint_still_has_a_way_out() -> None:
    assert str(capacity_error(2048, None)).endswith("; " + capacity._WAY_OUT)
    assert str(capacity_error(2048, None, device="cpu")).startswith("arena needs 2.0 KiB (2,048 bytes) on cpu; ")
    assert "looked free on cpu, yet the allocation failed" in str(capacity_error(2048, 4096, device="cpu"))


def test_meminfo_gives_what_is_available_not_what_is_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  5000 kB\n")
    assert capacity._host_free_nbytes(meminfo) == 5000 * 1024


def test_without_meminfo_pages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}

    def sysconf(name: str) -> int:
        if name not in known:
            raise ValueError(name)
        return known[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert capacity._host_free_nbytes(tmp_path / "none") == 1000 * 4096
    known["SC_AVPHYS_PAGES"] = 10
    assert capacity._host_free_nbytes(tmp_path / "none") == 10 * 4096
    known.clear()
    assert capacity._host_free_nbytes(tmp_path / "none") is None


def container(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("3000\n")
    (folder / "memory.stat").write_text("anon 1000\nactive_file 500\ninactive_file 700\n")
    return folder


def test_a_container_limit_leaves_what_is_not_in_use_or_is_page_cache(tmp_path: Path) -> None:
    assert capacity._container_free_nbytes(container(tmp_path, "10000")) == 10000 - (3000 - 500 - 700)
    assert capacity._container_free_nbytes(container(tmp_path, "1000")) == 0
    assert capacity._container_free_nbytes(container(tmp_path, "max")) is None
    assert capacity._container_free_nbytes(tmp_path / "none") is None


def test_the_tighter_of_host_and_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, inside, expected in [(7, 5, 5), (5, 7, 5), (7, None, 7), (None, 5, 5), (None, None, None)]:
        monkeypatch.setattr(capacity, "_host_free_nbytes", lambda value=host: value)
        monkeypatch.setattr(capacity, "_container_free_nbytes", lambda value=inside: value)
        assert device_free_nbytes(CPU) == expected


def test_this_machine_says_something_sensible() -> None:
    free = device_free_nbytes(CPU)
    assert free is not None
    assert 16 << 20 < free < 1 << 50


def test_cuda_counts_what_the_driver_has_and_what_the_cache_would_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "reserved_bytes.all.current": 900,
        "allocated_bytes.all.current": 500,
        "inactive_split_bytes.all.current": 150,
    }
    monkeypatch.setattr(capacity, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert device_free_nbytes(torch.device("cuda", 0)) == 1000 + 900 - 500 - 150
    stats.clear()
    assert device_free_nbytes(torch.device("cuda", 0)) == 1000
