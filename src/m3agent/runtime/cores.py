"""How many threads torch uses for the worker's steps, set for the worker's thread alone.

A decoded token wakes the reader's event loop. When all cores compute, the loop takes one from a thread that the others
wait for, spinning, dozens of times a token; so decode steps leave a core free.
"""

from __future__ import annotations

import ctypes

import torch


class Cores:
    """For the thread that makes it. Where torch's OpenMP library cannot be found, every step takes all cores.

    Not by `torch.set_num_threads`: that is also what threads begin with that use torch for the first time later on.
    """

    def __init__(self) -> None:
        self.all = torch.get_num_threads()
        self._used = self.all
        try:
            library = ctypes.CDLL(torch._C.__file__)
            self._openmp = library.omp_set_num_threads
        except (AttributeError, OSError, TypeError):
            self._openmp = None
            return
        # MKL follows OpenMP until someone called torch.set_num_threads; from then on it has a number of its own.
        self._mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)

    def leave_one(self) -> None:
        self._use(max(1, self.all - 1))

    def take_all(self) -> None:
        self._use(self.all)

    def _use(self, count: int) -> None:
        if self._openmp is None or count == self._used:
            return
        self._openmp(count)
        if self._mkl is not None:
            self._mkl(count)
        self._used = count
