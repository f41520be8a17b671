"""The worker's number of threads is its own."""

import threading
from collections.abc import Callable

import pytest
import torch

from m3agent.runtime.cores import Cores


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_other_threads_keep_theirs() -> None:
    seen: list[int] = []

    def worker() -> None:
        cores = Cores()
        cores.leave_one()
        seen.append(torch.get_num_threads())
        in_thread(lambda: seen.append(torch.get_num_threads()))  # a thread that uses torch for the first time
        cores.take_all()
        seen.append(torch.get_num_threads())
        cores.leave_one()

    in_thread(worker)
    assert seen in ([2, 3, 3], [3, 3, 3])  # the latter where torch has no OpenMP library to be found
    assert torch.get_num_threads() == 3


def test_a_single_thread_stays() -> None:
    def worker() -> None:
        torch.set_num_threads(1)
        cores = Cores()
        cores.leave_one()
        seen.append(torch.get_num_threads())

    before, seen = torch.get_num_threads(), list[int]()
    in_thread(worker)
    torch.set_num_threads(before)
    assert seen == [1]
