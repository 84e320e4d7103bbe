"""Trainers' routes: what they ask of the schedulers, as slime, SGLang and vLLM send it, and what is refused."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from penstock.protocol.control import (
    IN_MEMORY,
    AskDigests,
    AskState,
    Digest,
    HoldWeights,
    JoinGroup,
    SleepEngine,
    UpdateWeights,
    WakeEngine,
    WeightTensor,
)
from penstock.protocol.message import Message
from tests.services.client.fake_engine import FakeLink
from tests.services.openai.test_operator import answering, asked

HANDLE = bytes(range(64))
# As slime's SGLangEngine sends it (slime/backends/sglang_utils/sglang_engine.py).
GROUP = {
    "master_address": "10.0.0.1", "master_port": 5000, "rank_offset": 1, "world_size": 3,
    "group_name": "slime-pp_0", "backend": "nccl",
}  # fmt: skip
BROADCAST = {
    "names": ["a", "b"], "dtypes": ["bfloat16", "torch.float32"], "shapes": [[2, 3], []], "group_name": "slime-pp_0",
    "flush_cache": False, "weight_version": "5",
}  # fmt: skip
SHARED = {"name": "a", "dtype": "bfloat16", "shape": [2], "offset": 8,
          "handles": {"GPU-1": base64.b64encode(HANDLE).decode(), "cpu": "file"}}  # fmt: skip
SENT = (WeightTensor("a", "bfloat16", (2, 3)), WeightTensor("b", "float32", ()))
OPENED = (WeightTensor("a", "bfloat16", (2,), (("GPU-1", HANDLE), ("cpu", b"file")), 8),)


def both(tensors: tuple[WeightTensor, ...], group: str, version: str = "5", **more: Any) -> list[Message]:
    """Looked at, then done."""
    return [
        UpdateWeights(0, IN_MEMORY, version, tensors=tensors, group=group, check_only=check, **more)
        for check in (True, False)
    ]


FORMS: list[tuple[str, Any, list[Message], Any]] = [
    ("/init_weights_update_group", GROUP, [JoinGroup(0, "slime-pp_0", "10.0.0.1", 5000, 1, 3, "nccl")],
     {"success": True, "message": "Succeeded to initialize custom process group."}),
    ("/destroy_weights_update_group", {"group_name": "slime-pp_0"}, [JoinGroup(0, "slime-pp_0")],
     {"success": True, "message": "Succeeded to destroy custom process group."}),
    ("/update_weights_from_distributed", BROADCAST, both(SENT, "slime-pp_0"),
     {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 2,
      "weight_version": "4"}),
    ("/update_weights_from_tensor", {"tensors": [SHARED], "weight_version": "5", "abort_all_requests": True},
     both(OPENED, "", abort=True),
     {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 2,
      "weight_version": "4"}),
    ("/init_weight_transfer_engine", {"init_info": {key: GROUP[key] for key in list(GROUP)[:4]}},
     [JoinGroup(0, "weight_transfer", "10.0.0.1", 5000, 1, 3, "nccl")], {"message": "Weight transfer initialized"}),
    ("/init_weight_transfer_engine", {"init_info": {}}, [], {"message": "Weight transfer initialized"}),
    ("/start_weight_update", {"is_checkpoint_format": True}, [HoldWeights(0)], {"message": "Weight update started"}),
    ("/start_weight_update", None, [HoldWeights(0)], {"message": "Weight update started"}),
    ("/update_weights",
     {"update_info": {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}},
     [AskState(0), *both(SENT, "weight_transfer")], {"message": "Weights updated"}),
    ("/update_weights", {"update_info": {"tensors": [SHARED]}}, [AskState(0), *both(OPENED, "")],
     {"message": "Weights updated"}),
    ("/finish_weight_update", {}, [AskState(0), HoldWeights(0, "5")], {"message": "Weight update finished"}),
    ("/finish_weight_update", {"weight_version": "x"}, [HoldWeights(0, "x")], {"message": "Weight update finished"}),
    ("/release_memory_occupation", {}, [SleepEngine(0)], None),
    ("/resume_memory_occupation", {"tags": ["weights"]}, [WakeEngine(0)], None),
    ("/resume_memory_occupation", {"tags": None}, [WakeEngine(0)], None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "sent", "told"), FORMS)
async def test_every_form(path: str, body: Any, sent: list[Message], told: Any) -> None:
    port = FakeLink(answering(version="4", requests=2))
    status, answer, messages = await asked(port, path, **({} if body is None else {"json": body}))
    assert (status, answer, messages) == (200, told, sent)


async def test_sums() -> None:
    digests = (Digest("a", "float32", 1.0, 255), Digest("b", "bfloat16", 0.0, 0))
    status, answer, sent = await asked(
        FakeLink(answering(version="4", digests=digests)), "/weights_checker", json={"action": "checksum"}
    )
    assert (status, sent) == (200, [AskDigests(0)])
    assert answer["payload"] == {
        "weight_version": "4", "checksums": {"a": "00000000000000ff", "b": "0000000000000000"},
        "dtypes": {"a": "float32", "b": "bfloat16"}, "offsets": {"a": 1.0},
    }  # fmt: skip
    assert (await asked(FakeLink(answering()), "/get_world_size", "GET"))[1] == {"world_size": 1}


WRONG: list[tuple[str, Any, str]] = [
    ("/init_weights_update_group", {**GROUP, "world_size": 1}, "world_size"),
    ("/init_weights_update_group", {**GROUP, "rank_offset": 3}, "world_size"),
    ("/init_weights_update_group", {**GROUP, "rank_offset": 0}, "rank_offset"),
    ("/init_weights_update_group", {**GROUP, "master_port": 70000}, "master_port"),
    ("/init_weights_update_group", {**GROUP, "master_address": "a b"}, "master_address"),
    ("/init_weights_update_group", {**GROUP, "backend": "mpi"}, "backend"),
    ("/init_weights_update_group", {**GROUP, "group_name": "a/b"}, "group_name"),
    ("/update_weights_from_distributed", {**BROADCAST, "shapes": [[2, 3]]}, "names"),
    ("/update_weights_from_distributed", {**BROADCAST, "shapes": [[2, 3], [-1]]}, "shapes"),
    ("/update_weights_from_distributed", {**BROADCAST, "names": []}, "names"),
    ("/update_weights_from_distributed", {**BROADCAST, "weight_version": "a b"}, "weight_version"),
    ("/update_weights_from_distributed", {**BROADCAST, "load_format": "flattened_bucket"}, "load_format"),
    ("/update_weights_from_tensor", {}, "tensors"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVAA=="]}, "serialized_named_tensors"),
    ("/update_weights_from_tensor", {"tensors": [{**SHARED, "handles": {}}]}, "tensors[0].handles"),
    ("/update_weights_from_tensor", {"tensors": [{**SHARED, "handles": {"GPU-1": "?"}}]}, "tensors[0].handles"),
    ("/update_weights_from_tensor", {"tensors": [{**SHARED, "offset": -1}]}, "tensors[0].offset"),
    ("/init_weight_transfer_engine", {"init_info": {"master_address": "a"}}, "init_info"),
    ("/init_weight_transfer_engine", {}, "init_info"),
    ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
    ("/update_weights", {"update_info": {}}, "update_info"),
    ("/update_weights", {"update_info": {"names": ["a"], "tensors": [SHARED]}}, "update_info"),
    ("/update_weights", {"update_info": {"names": ["a"], "packed": True}}, "update_info.packed"),
    ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, "update_info.ipc_handles_pickled"),
    ("/resume_memory_occupation", {"tags": ["everything"]}, "tags[0]"),
    ("/weights_checker", {"action": "snapshot"}, "action"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
async def test_what_is_wrong_is_named(path: str, body: Any, param: str) -> None:
    status, told, sent = await asked(FakeLink(answering()), path, json=body)
    assert (status, sent) == (400, []), told
    assert told["error"]["param"].startswith(param)
    assert param.partition("[")[0].rpartition(".")[2] in told["error"]["message"]


@pytest.mark.parametrize("path", ["/update_weights_from_distributed", "/init_weights_update_group"])
async def test_what_schedulers_refuse_is_no_success(path: str) -> None:
    body = GROUP if "group" in path else BROADCAST
    status, told, sent = await asked(FakeLink(answering(error="tensor a is not there")), path, json=body)
    assert (status, told["success"], told["message"], len(sent)) == (400, False, "tensor a is not there", 1)
