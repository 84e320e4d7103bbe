"""Arrays to the device and results back. On a GPU through pinned buffers, which are written again in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine_core.execution.transfer import Download, PinnedPool, Upload

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_arrive_whole_and_typed(device: str) -> None:
    upload = Upload(torch.device(device), buffers=2)
    sent = []
    for turn in range(20):
        arrays = [
            np.arange(turn, turn + 5, dtype=np.int64),
            np.full((3, turn), turn, np.int32),
            np.array([1.5, float("-inf")], np.float32),
            np.zeros(0, np.int64),
            np.array([7], np.int32),
        ]
        sent.append((arrays, upload.send(arrays)))
    for arrays, tensors in sent:
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.device.type == device
            assert np.array_equal(tensor.cpu().numpy(), array)
            assert tensor.cpu().numpy().dtype == array.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_pinned_memory_is_used_again_behind_what_reads_it(device: str) -> None:
    pool = PinnedPool(1 << 22, torch.float32, torch.device(device))
    memory = pool.take()
    first, target = memory.data_ptr(), torch.empty(1 << 22, device=device)
    assert memory.is_pinned() == (device == "cuda")
    for turn in range(1, 20):
        assert not memory.any()
        memory.fill_(turn)
        target.copy_(memory, non_blocking=True)
        pool.give(memory, sent=True)
        memory = pool.take()
        assert memory.data_ptr() == first
        assert torch.equal(target.cpu(), torch.full((1 << 22,), float(turn)))
    assert pool.take().data_ptr() != first, "nobody has given this one back"


@pytest.mark.gpu
def test_an_array_overwrites_the_first_of_a_tensor_in_stream_order() -> None:
    upload = Upload(torch.device("cuda"), buffers=2)
    target = torch.zeros(6, dtype=torch.int32, device="cuda")
    seen = []
    for turn in range(20):
        upload.put(np.full(4, turn, np.int32), target)
        seen.append(target.clone())
    assert [tensor.tolist() for tensor in seen] == [[turn] * 4 + [0, 0] for turn in range(20)]


@pytest.mark.gpu
def test_a_buffer_is_kept_until_its_copy_has_ended_in_whichever_stream() -> None:
    """The copies wait behind other work of a stream that was not current when the upload was made."""
    upload = Upload(torch.device("cuda"), buffers=2)
    upload.send([np.zeros(1 << 20, np.int32)])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # cycles
        sent = [upload.send([np.full(1 << 20, turn, np.int32)])[0] for turn in range(6)]
        torch.cuda.synchronize()
    for turn, tensor in enumerate(sent):
        assert bool((tensor == turn).all()), turn


@pytest.mark.gpu
def test_results_of_another_stream_are_fetched_behind_it() -> None:
    download = Download(torch.device("cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        made = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        torch.cuda._sleep(200_000_000)
        made += 7
        (host,), done = download.fetch([made])
        download.guard()
        made += 1
    assert done is not None
    done.synchronize()
    assert bool((host == 7).all())


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_there_after_the_event(device: str) -> None:
    download = Download(torch.device(device))
    tensors = [torch.arange(1000, device=device) * 3, torch.zeros(0, device=device), torch.ones(2, 2, device=device)]
    fetched, done = download.fetch(tensors)
    if done is not None:
        done.synchronize()
    for tensor, host in zip(tensors, fetched, strict=True):
        assert host.device.type == "cpu"
        assert torch.equal(host, tensor.cpu())
