"""Images on a GPU: the CPU's tokens, also where graphs serve the steps, and pieces beside steps on a stream of their
own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine_core import loading
from penstock.engine_core.execution.cuda_graphs import graph_sizes
from penstock.engine_core.execution.warmup import step_peak
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models import registry
from penstock.protocol.steps import StepPlan
from tests.engine_core.execution.harness import column, tokens_of
from tests.engine_core.execution.image_scene import LENGTH, Scene, asked, made, seeing_spec

pytestmark = pytest.mark.gpu

PARTS = (4, Size(16, 40), 3, Size(32, 16), 5)
DECODES = 8


def gpu_scene(*, graphs: bool) -> Scene:
    """The small model with the CPU's weights, ready for steps."""
    device, sources = torch.device("cuda"), made(seeing_spec())
    with torch.inference_mode():
        model = registry.build(seeing_spec(), torch.float32, device, LENGTH)
        tower = registry.build_tower(model)
        assert tower is not None
        assert sources.encoder is not None
        loading.load(model, Path(), "dummy", 3, tower)
        stored = {**sources.model.destinations(), **sources.encoder.tower.destinations()}
        for name, place in {**model.destinations(), **tower.destinations()}.items():
            source = stored[name].tensor
            assert place.tensor is not None
            assert source is not None
            place.tensor.copy_(source)
    sizes = graph_sizes(3, 1, 3, LENGTH, LENGTH, images=True, adapters=True) if graphs else None
    found = Scene(model, tower, graphs=sizes, adapters=True)
    found.runner.compile(())
    found.runner.prepare()
    found.adapt()
    return found


def said_on_cpu(adapter: int) -> list[int]:
    scene = made(seeing_spec(), adapters=True)
    scene.adapt()
    prompt = scene.prompt(*PARTS, adapter=adapter)
    scene.run(prompt, (9, 20), decodes=DECODES)
    return prompt.output


@pytest.fixture(scope="module")
def on_cpu() -> list[int]:
    return said_on_cpu(0)


@pytest.mark.parametrize("adapter", [0, 1])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_the_cpus(on_cpu: list[int], graphs: bool, adapter: int) -> None:
    """Also of chunks with images in graphs, whose rows may have an adapter; decoding rows are turned by the slots'
    offsets there."""
    scene, expected = gpu_scene(graphs=graphs), said_on_cpu(adapter)
    assert (expected == on_cpu) is not bool(adapter)
    for cuts in ((), (9, 20)):
        prompt = scene.prompt(*PARTS, adapter=adapter)
        before = scene.runner.graphs.forward.replays if scene.runner.graphs is not None else 0
        scene.run(prompt, cuts, decodes=DECODES)
        assert prompt.output == expected
        if scene.runner.graphs is not None:
            assert scene.runner.graphs.forward.replays - before == len(cuts) + 1 + DECODES


def test_pieces_run_beside_steps(on_cpu: list[int]) -> None:
    """A step between every two pieces; rows are those of a picture that is encoded alone."""
    scene = gpu_scene(graphs=True)
    assert scene.encoder is not None
    first, size = scene.prompt(*PARTS), Size(64, 48)
    found = [tokens_of(result) for result in scene.run(first)][-1]
    scene.encode(size, 5, 0)
    alone = scene.encoder.cache[:48].clone()
    scene.encoder.begin(asked(size, 5, 14, 48))
    pieces, on, flight = [], column(0), []
    while len(flight) < DECODES or not pieces[-1].last:
        if not (pieces and pieces[-1].last):
            pieces.append(scene.encoder.launch())
        if len(flight) < DECODES:
            flight.append(scene.runner.launch(StepPlan(step=1, epoch=0, decode_on=on)))
            on = b""
    found += [token for launched in flight for token in tokens_of(scene.runner.collect(launched))]
    torch.cuda.synchronize()
    assert all(piece.finished and piece.seconds > 0 for piece in pieces)
    assert scene.encoder.trouble() == ""
    assert torch.equal(scene.encoder.cache[14:62], alone)
    assert found == on_cpu


def test_the_largest_image_is_part_of_the_measured_memory() -> None:
    scene = gpu_scene(graphs=False)
    options, model = scene.runner.options, scene.model
    with_image = step_peak(model, model.spec, options, 64)
    without = step_peak(model, model.spec, replace(options, encoder=None), 64)
    assert with_image > without
