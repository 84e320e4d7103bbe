"""preprocessor_config.json and processor_config.json: how a model's pictures are resized and normalised. Imports no
torch.

transformers 5 writes the image processor into processor_config.json, older versions into a file of its own; the first
of both is read, as transformers does. A key that is absent or null has the default of its class. What changes
arithmetic and is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.engine_core.images.processor_spec import (
    FixedSize,
    LongestEdge,
    ProcessorSpec,
    Resize,
    SmartResize,
    Triple,
)
from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.protocol.errors import ModelError

PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
NESTED = "image_processor"  # key of the first file

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC, MOST_FILTER = 2, 3, 5  # of Pillow's `Resampling`

# By the class's name, without what says how it is computed.
SUFFIXES = ("Fast", "Pil")
QWEN, GEMMA, PIXTRAL = "Qwen2VLImageProcessor", "Gemma3ImageProcessor", "PixtralImageProcessor"
ALIASES: Mapping[str, str] = {"Qwen2_5_VLImageProcessor": QWEN, "Qwen3VLImageProcessor": QWEN}
MODELS: Mapping[str, str] = {  # the class of a model whose file names none. Source: image_processing_auto.py
    "gemma3": GEMMA,
    "mistral3": PIXTRAL,
    "qwen2_5_vl": QWEN,
    "qwen2_vl": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    QWEN: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": BICUBIC, "patch_size": 14, "merge_size": 2},
    GEMMA: {"image_mean": HALF, "image_std": HALF, "resample": BILINEAR, "size": 224},
    PIXTRAL: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": BICUBIC, "size": {"longest_edge": 1024}},
}
STEPS = ("do_resize", "do_rescale", "do_normalize")  # each is done
# Keys without effect on one picture in RGB. Padding fills pictures of a batch up to its largest.
SILENT = frozenset(
    ("auto_map", "crop_size", "data_format", "default_to_square", "device", "disable_grouping", "do_convert_rgb",
     "feature_extractor_type", "image_processor_type", "image_seq_length", "input_data_format", "model_input_names",
     "num_crops", "pad_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size",
     "pan_and_scan_min_ratio_to_activate", "processor_class", "return_tensors", "temporal_patch_size")
)  # fmt: skip
READ = frozenset(("image_mean", "image_std", "rescale_factor", "resample", "size", *STEPS))
OWN: Mapping[str, frozenset[str]] = {
    QWEN: frozenset(("min_pixels", "max_pixels", "patch_size", "merge_size")),
    GEMMA: frozenset(("do_pan_and_scan",)),
    PIXTRAL: frozenset(("patch_size", "do_pad")),
}


def read_processor(folder: Path, model_type: str, cell: int) -> ProcessorSpec | None:
    """The image processor of a model folder, None where neither file is there. `cell` are pixels of the side of what
    becomes one token, as the vision encoder has it (of Gemma 3: one patch).

    Raises ModelError: the file and the key that is malformed, not known, or contradicts the encoder.
    """
    file = find_file(folder)
    if file is None:
        return None
    name = class_of(file, model_type)
    given = {key: value for key, value in file.values.items() if value is not None}
    file = ConfigFile(file.path, given, DEFAULTS[name])
    for key, value in file.values.items():
        if key not in READ | SILENT | OWN[name] and value is not False:
            raise file.error(key, f"Penstock does not know what it changes in a {name}, and does not pass it over")
    for key in STEPS:
        if not file.flag(key, True):
            raise file.error(key, "Penstock resizes, rescales and normalises every picture")
    resample = file.integer("resample", low=0, high=MOST_FILTER)
    return ProcessorSpec(
        mean=triple(file, "image_mean"),
        std=triple(file, "image_std"),
        rescale=file.number("rescale_factor", 1 / 255),
        resize=RESIZES[name](file, cell),
        resample=resample,
    )


def find_file(folder: Path) -> ConfigFile | None:
    """The image processor's settings, in the file that transformers would read."""
    path = folder / PROCESSOR
    if path.is_file():
        nested = read_json(path).values.get(NESTED)
        if nested is not None:
            if not isinstance(nested, dict):
                raise ModelError(f"{path}: {NESTED} must be an object")
            return ConfigFile(path, nested)
    path = folder / PREPROCESSOR
    return read_json(path) if path.is_file() else None


def class_of(file: ConfigFile, model_type: str) -> str:
    """The class of transformers that the settings are for."""
    named = file.get("image_processor_type") or file.get("feature_extractor_type")
    if named is None:
        found = MODELS.get(model_type)
        if found is None:
            raise ModelError(f"{file.path}: image_processor_type is missing, and a {model_type} has none by default")
        return found
    name = str(named)
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    name = ALIASES.get(name, name)
    if name not in DEFAULTS:
        raise file.error("image_processor_type", f"Penstock knows {', '.join(DEFAULTS)}")
    return name


def triple(file: ConfigFile, key: str) -> Triple:
    """A number for each channel."""
    value = file.get(key)
    numbers = list(value) if isinstance(value, list | tuple) else [value] * 3
    if len(numbers) != 3 or not all(type(number) in (int, float) for number in numbers):
        raise file.error(key, "it must be a number, or one for each of three channels")
    if key == "image_std" and not all(numbers):
        raise file.error(key, "it divides, so it must not be 0")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def sides(file: ConfigFile, key: str, known: tuple[str, ...]) -> ConfigFile:
    """An object of numbers of pixels."""
    value = file.get(key)
    if isinstance(value, dict):
        value = {name: number for name, number in value.items() if number is not None}
    if not isinstance(value, dict) or not value.keys() <= set(known):
        raise file.error(key, f"it must be an object of {', '.join(known)}")
    return ConfigFile(file.path, value)


def smart(file: ConfigFile, cell: int) -> Resize:
    """Qwen's. Older files have min_pixels and max_pixels, which go before `size`."""
    least, most = file.get("min_pixels"), file.get("max_pixels")
    if file.get("size") is not None:
        size = sides(file, "size", ("shortest_edge", "longest_edge", "min_pixels", "max_pixels"))
        least, most = size.integer("shortest_edge", least), size.integer("longest_edge", most)
    usual = SmartResize()
    least, most = file.integer("min_pixels", least or usual.least), file.integer("max_pixels", most or usual.most)
    if least > most:
        raise file.error("size", f"it allows no picture: at least {least} pixels, at most {most}")
    factor = file.integer("patch_size") * file.integer("merge_size")
    if factor != cell:
        raise file.error("patch_size", f"with merge_size it is {factor} pixels, and the vision encoder has {cell}")
    return SmartResize(least=least, most=most, factor=factor)


def fixed(file: ConfigFile, cell: int) -> Resize:
    """Gemma 3's."""
    if file.flag("do_pan_and_scan"):
        raise file.error("do_pan_and_scan", "Penstock shows a model whole pictures; set it to false")
    if type(file.get("size")) is int:
        found = FixedSize(height=file.integer("size"), width=file.integer("size"))
    else:
        size = sides(file, "size", ("height", "width"))
        found = FixedSize(height=size.integer("height"), width=size.integer("width"))
    if found.height % cell or found.width % cell:
        raise file.error("size", f"it must be multiples of the vision encoder's patch of {cell} pixels")
    return found


def longest(file: ConfigFile, cell: int) -> Resize:
    """Pixtral's. What sides are multiples of is the model's: its processor has no use for the image processor's own."""
    whole = file.path.parent / PROCESSOR
    if whole.is_file():
        outer = read_json(whole)
        factor = outer.integer("patch_size", 16) * outer.integer("spatial_merge_size", 1)
        if factor != cell:
            why = f"with spatial_merge_size it is {factor} pixels, and the vision encoder has {cell}"
            raise outer.error("patch_size", why)
    size = sides(file, "size", ("longest_edge", "height", "width"))
    if size.get("longest_edge") is not None:
        edge = size.integer("longest_edge")
        return LongestEdge(height=edge, width=edge, factor=cell)
    return LongestEdge(height=size.integer("height"), width=size.integer("width"), factor=cell)


RESIZES: Mapping[str, Callable[[ConfigFile, int], Resize]] = {QWEN: smart, GEMMA: fixed, PIXTRAL: longest}
