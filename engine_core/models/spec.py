"""What config.json says about a transformer, a decoder or an encoder. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from penstock.engine_core.models.config_file import ROPE_KEYS, ConfigFile, read_json, refuse_unread
from penstock.engine_core.models.families import Family, families
from penstock.engine_core.models.foreign import beside, foreign
from penstock.engine_core.models.layer_spec import (
    EXPANSION,
    NO_ROPE,
    AttentionSpec,
    Body,
    ExpertSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)
from penstock.engine_core.models.pooler import ClassifierSpec, DenseSpec, read_projection
from penstock.engine_core.models.quantization.config import KEY, read_quantization
from penstock.engine_core.models.quantization.online import NONE, ONLINE, fitted, online
from penstock.engine_core.models.quantization.rules import Quantization
from penstock.engine_core.models.quantization.weight_format import Formats, WeightFormat
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.recurrence_spec import RecurrenceSpec
from penstock.engine_core.models.vision_reading import VISION, read_sections, read_vision, served_kind
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.engine_core.models.weight_files import read_names, read_shape
from penstock.protocol.errors import ConfigError, ModelError

STACKED = "mlp.experts.gate_up_proj"  # in a checkpoint whose experts are
# Models of other kinds: a key of config.json or a pattern of the architecture's name, and the kind in words.
FOREIGN: tuple[tuple[str, str, str], ...] = (
    ("audio_config", r"Whisper|Wav2Vec|Speech|Audio|TTS", "an audio model"),
    ("vision_config", r"VL|Llava|Vision|CLIP|ViT|Image|Paligemma", "a vision model"),
    ("is_encoder_decoder", r"T5|Bart|M2M|Marian|Pegasus", "an encoder-decoder model"),
    ("", r"ForTokenClassification|ForQuestionAnswering|RewardModel|PreTraining", "a model with another head"),
    ("", r"Bert|BERT|Roberta|MPNet|Electra|XLM|Deberta|ForMaskedLM", "an encoder of another kind"),
    ("", r"ForSequenceClassification", "a classifier of another kind"),
)
OUTPUT = "lm_head.weight"
HEAD = ".lm_head."  # in names of its tensors
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATION = "--quantization"
TEXT = "text_config"  # where a model of text and images has the numbers of its text half
# Keys beside TEXT that are about the whole model.
OUTER = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "quantization", "auto_map")
MROPE = "mrope"  # also how its settings begin
# Tensors beside the text half of a model of text and images or audio.
ENCODERS = (
    *("visual.", "vision_tower.", "vision_model.", "vision_encoder.", "vision_adapter.", "vision_language_adapter."),
    *("multi_modal_projector.", "audio.", "audio_tower.", "embed_vision.", "embed_audio.", "mtp."),
)

NO_ATTENTION = AttentionSpec(heads=0, kv_heads=0, head_dim=0, rope=NO_ROPE)
BEFORE = re.compile(r"^(model\.layers\.)(\d+)\.input_layernorm")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A transformer: a decoder, or an encoder, whose attention goes both ways."""

    family: str
    hidden: int
    body: Body
    vocab_size: int
    tied: bool  # the output embedding is the input embedding
    max_position: int  # length served by default
    longest: int  # length that may be asked for
    dtype: str  # of the checkpoint
    headless: bool = False  # it has no output embedding, own or tied: it makes vectors alone
    names: tuple[tuple[str, str], ...] = ()  # as of Family
    unread: tuple[str, ...] = ()  # beginnings of names of tensors that are part of the checkpoint, and not of this
    quantization: Quantization | None = None  # of the checkpoint, or as its weights are quantized while they load
    head_form: WeightFormat | None = None  # of the output embedding
    classifier: ClassifierSpec | None = None  # it classifies texts, in place of an output embedding
    projection: tuple[DenseSpec, ...] = ()  # what vectors go through behind pooling
    vision: VisionSpec | None = None  # it sees images
    kv_windows: tuple[int, ...] = (0,)  # of each KV group, 0: it holds all keys; a stage has those of the whole model

    @property
    def blocks(self) -> tuple[LayerSpec, ...]:
        """The layers, one by one."""
        return self.body.layers

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of each layer that has one."""
        return tuple(layer.attention for layer in self.blocks if layer.attention is not None)

    @property
    def attention(self) -> AttentionSpec:
        """The first. Others may have heads of another size, and another number of key-value heads; a stage of recurrent
        layers alone has none."""
        return next(iter(self.attentions), NO_ATTENTION)

    @property
    def recurrences(self) -> tuple[RecurrenceSpec, ...]:
        """Of each layer that keeps a state of a fixed size for a sequence."""
        return tuple(layer.recurrence for layer in self.blocks if layer.recurrence is not None)

    @cached_property
    def encoder(self) -> bool:
        """Whether its attention goes both ways: a prompt is run at once, and leaves nothing in a cache."""
        return any(attention.bidirectional for attention in self.attentions)

    @property
    def vector(self) -> int:
        """Numbers of a text's vector."""
        return self.projection[-1].outputs if self.projection else self.hidden

    @property
    def norm(self) -> NormSpec:
        """Of the last layer's output."""
        return self.blocks[-1].norm

    @property
    def sparse(self) -> tuple[ExpertSpec, ...]:
        """The experts of each layer that has some."""
        return tuple(layer.experts for layer in self.blocks if layer.experts is not None)

    @property
    def dense(self) -> tuple[MlpSpec, ...]:
        """The MLP that every token goes through, of each layer that has one."""
        return tuple(layer.dense for layer in self.blocks if layer.dense is not None)

    def part(self, kept: Sequence[int]) -> ModelSpec:
        """The same model with these of its layers alone."""
        return self.with_layers(tuple(self.blocks[layer] for layer in kept))

    def with_attention(self, **fields: object) -> ModelSpec:
        """The same model with these fields of the attention of every layer."""
        return self.with_layers(tuple(layer.with_attention(**fields) for layer in self.blocks))

    def with_layers(self, layers: tuple[LayerSpec, ...]) -> ModelSpec:
        return msgspec.structs.replace(self, body=msgspec.structs.replace(self.body, layers=layers))

    def with_ropes(self, turn: Callable[[AttentionSpec], RopeSpec]) -> ModelSpec:
        """The same with these rotary positions of every layer, that of an MTP head among them."""

        def turned(layer: LayerSpec) -> LayerSpec:
            return layer if layer.attention is None else layer.with_attention(rope=turn(layer.attention))

        found, mtp = self.with_layers(tuple(map(turned, self.blocks))), self.body.mtp
        if mtp is None:
            return found
        mtp = msgspec.structs.replace(mtp, layer=turned(mtp.layer))
        return msgspec.structs.replace(found, body=msgspec.structs.replace(found.body, mtp=mtp))

    def without_vision(self) -> ModelSpec:
        """The text half alone: tensors of the vision encoder are left unread."""
        if self.vision is None:
            return self
        found = self.with_ropes(lambda own: msgspec.structs.replace(own.rope, sections=(), sections_alternate=False))
        return msgspec.structs.replace(found, vision=None, unread=(*self.unread, *self.vision.places))


def read_spec(folder: Path, quantization: str = NONE) -> ModelSpec:
    """The model that `folder`/config.json describes. quantization: a format of ONLINE, into which its weights are
    rounded while they load, or NONE: they stay as they are.

    Raises ModelError naming the file and the key: unknown architecture, code of the model's own, an unknown
    quantization, activation or rope scaling, a missing or impossible size.
    """
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder / 'config.json'}: no such file; {foreign(folder)}")
    file = read_json(folder / "config.json")
    if (found := beside(folder)) is not None:
        raise ModelError(f"{found[0]}: {found[1]}")
    family, names = read_family(file), read_names(folder)
    whole, file = file, text_half(file, family)
    spec = with_vision(with_layout(decoder_spec(file, family), names), whole, folder)
    if any(experts.transposed for experts in spec.sparse):
        spec = with_axes(spec, read_shape(folder, STACKED))
    if spec.encoder or spec.classifier is not None:
        spec = msgspec.structs.replace(spec, tied=False, headless=True)
    if not (spec.tied or (has_head(file) and any(HEAD in f".{name}" for name in names or (OUTPUT,)))):
        spec = msgspec.structs.replace(spec, headless=True)
    spec = msgspec.structs.replace(spec, projection=read_projection(folder))
    return with_quantization(spec, file, read_quantization(file, names), quantization)


def stored_name(spec: ModelSpec, name: str) -> str:
    """A tensor's name in the checkpoint. Where norms are behind parts, that before a layer is the last one's."""
    if spec.body.post_norm:
        name = re.sub(r"^model\.norm\b", f"model.layers.{spec.layers}.input_layernorm", name)
        name = BEFORE.sub(lambda found: f"{found[1]}{int(found[2]) - 1}.output_layernorm", name)
    for ours, theirs in spec.names:
        name = name.replace(ours, theirs)
    return name


def with_quantization(spec: ModelSpec, file: ConfigFile, stored: Quantization | None, wanted: str) -> ModelSpec:
    """The same with the formats of its matrices: as they are stored, or as they are `wanted` while they load.

    Raises ModelError for a matrix that must not be quantized, ConfigError for weights that are quantized already.
    """
    if stored is not None and wanted != NONE and ONLINE[wanted].kind not in {form.kind for form in stored.formats}:
        why = f"the weights are quantized already ({stored.label}); leave it out"
        raise ConfigError(QUANTIZATION, wanted, why)
    found = stored or (None if wanted == NONE else online(wanted))
    if found is None:
        return spec
    if found.kv_scheme is not None:
        scales = {"kv_fp8": True, "kv_scales": "head" if found.kv_scheme.per_head else "layer"}
        if any(attention.kv_shared for attention in spec.attentions):
            why = "Penstock serves layers that share keys and values without them"
            raise ModelError(f"{file.path}: {KEY} has scales of cached keys and values; {why}")
        spec = spec.with_attention(**scales)
    layers = tuple(with_formats(spec, layer, f"model.layers.{at}", found, file) for at, layer in enumerate(spec.blocks))
    head = found.format_of("lm_head")
    if head is not None and (spec.tied or spec.headless):
        why = "it is the input embedding, which is not" if spec.tied else "the model has none"
        raise ModelError(f"{file.path}: {KEY} says that lm_head is quantized, and {why}")
    return msgspec.structs.replace(spec.with_layers(layers), quantization=found, head_form=head)


def with_formats(spec: ModelSpec, layer: LayerSpec, name: str, found: Quantization, file: ConfigFile) -> LayerSpec:
    """A layer with the formats of its matrices. name: of the layer in a Llama."""
    attention, experts, dense = layer.attention, layer.experts, layer.dense
    if attention is not None:
        inputs = {module: matrix.inputs for module, matrix in attention.matrices(spec.hidden).items()}
        own = formats_of(spec, f"{name}.self_attn", inputs, found)
        own = tuple((module, form) for module, form in own if module != EXPANSION or form.packing != "dense")
        layer = layer.with_attention(formats=own)
    if layer.recurrence is not None:
        inputs = {matrix: shape[1] for matrix, shape in layer.recurrence.products(spec.hidden).items()}
        own = formats_of(spec, f"{name}.{layer.recurrence.place}", inputs, found)
        layer = msgspec.structs.replace(layer, recurrence=msgspec.structs.replace(layer.recurrence, formats=own))
    if layer.mlp is None:
        return layer
    if experts is None:
        assert isinstance(layer.mlp, MlpSpec), "dense"
        return msgspec.structs.replace(layer, mlp=with_mlp_formats(spec, layer.mlp, f"{name}.mlp", found))
    for router in ("mlp.gate", *([f"mlp.{experts.shared_name}_gate"] if experts.shared_gate else [])):
        module = stored_name(spec, f"{name}.{router}.weight").removesuffix(".weight")
        if found.format_of(module) is not None:
            raise ModelError(f"{file.path}: {KEY} says that {module} is quantized, and Penstock routes unquantized")
    place = f"{name}.mlp.experts" if experts.stacked else f"{name}.mlp.experts.0"
    names = ("gate_up_proj",) if experts.stacked else experts.parts
    formats = formats_of(spec, place, {**dict.fromkeys(names, spec.hidden), "down_proj": experts.width}, found)
    first = {form for module, form in formats if module != "down_proj"}
    if formats and (len(formats) <= len(names) or len(first) > 1):
        why = "gates, ups and downs of experts must be, gates and ups alike"
        raise ModelError(f"{file.path}: {KEY} quantizes only some matrices of {place}, or in different formats; {why}")
    if any(form.ordered for _, form in formats):
        why = "Penstock serves such experts without an order of their inputs (desc_act, actorder)"
        raise ModelError(f"{file.path}: {KEY} quantizes {place} in the order of activations; {why}")
    if dense is not None:
        shared = with_mlp_formats(spec, dense, f"{name}.mlp.{experts.shared_name}", found)
        experts = msgspec.structs.replace(experts, shared=shared)
    return msgspec.structs.replace(layer, mlp=msgspec.structs.replace(experts, formats=formats))


def with_mlp_formats(spec: ModelSpec, mlp: MlpSpec, name: str, found: Quantization) -> MlpSpec:
    names = ("gate_up_proj",) if mlp.fused else ("gate_proj", "up_proj") if mlp.gated else ("up_proj",)
    inputs = {**dict.fromkeys(names, spec.hidden), "down_proj": mlp.width}
    return msgspec.structs.replace(mlp, formats=formats_of(spec, name, inputs, found))


def formats_of(spec: ModelSpec, place: str, inputs: Mapping[str, int], found: Quantization) -> Formats:
    """Of those matrices at a place that are quantized. inputs: of each."""
    stored = {name: stored_name(spec, f"{place}.{name}.weight").removesuffix(".weight") for name in inputs}
    forms = {name: found.format_of(module) for name, module in stored.items()}
    fit = {name: fitted(form, inputs[name]) for name, form in forms.items() if form is not None}
    return tuple((name, form) for name, form in fit.items() if form is not None)


def text_half(file: ConfigFile, family: Family) -> ConfigFile:
    """Of a model of text and images the numbers of the text half; of others the file itself.

    Raises ModelError where the text half is another family's. A token of text has one position, so that rotary
    positions of images' axes (mRoPE: Qwen2-VL, 2024) are ordinary ones.
    """
    named, inner = file.get("architectures"), file.values.get(TEXT)
    if not (isinstance(named, list) and any(name in family.wrappers for name in named)):
        return file
    if isinstance(inner, dict):
        kind, known = inner.get("model_type"), (family.name, *family.texts)
        if kind is not None and kind not in known:
            served = [text for other in within(named) for text in (other.name, *other.texts)]
            raise ModelError(
                f"{file.path}: {TEXT} is of {kind!r}; Penstock serves {' and '.join(served)} in {named[0]}"
            )
        outer = {key: file.values[key] for key in OUTER if key in file.values}
        values = {**inner, **outer}
    else:
        values = dict(file.values)
    for key in ROPE_KEYS:
        if isinstance(rope := values.get(key), dict):
            values[key] = {name: "default" if value == MROPE else value
                           for name, value in rope.items() if not name.startswith(MROPE)}  # fmt: skip
    return ConfigFile(file.path, values)


def with_vision(spec: ModelSpec, file: ConfigFile, folder: Path) -> ModelSpec:
    """The same with the vision encoder that the whole config.json has, if it is served. Raises ModelError."""
    if (kind := served_kind(file, folder)) is None:
        return spec
    vision = read_vision(file, kind, folder)
    if vision.token_id >= spec.vocab_size:
        raise ModelError(f"{file.path}: image_token_id is {vision.token_id}, and the vocabulary has {spec.vocab_size}")
    for what, found, room in (
        ("embeddings of", vision.outputs, spec.hidden),
        ("DeepStack levels:", len(vision.levels), min(len(vision.levels), spec.layers)),
    ):
        if found != room:
            raise ModelError(f"{file.path}: {VISION} has {what} {found}, and the text half has room for {room}")
    if vision.mrope:
        inner = file.values[TEXT] if isinstance(file.values.get(TEXT), dict) else file.values
        spec = spec.with_ropes(lambda own: read_sections(own.rope, own.head_dim, file, inner, kind))
    unread = tuple(start for start in spec.unread if start not in vision.places)
    return msgspec.structs.replace(spec, vision=vision, unread=unread)


def with_layout(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """The same for a checkpoint that holds tensors of these names: transformers 5 can store experts stacked, by names
    that are the same in every family."""
    single = any(not experts.stacked for experts in spec.sparse)
    if not single or not any(name.endswith(STACKED) for name in names):
        return spec
    return msgspec.structs.replace(with_experts(spec, stacked=True), names=())


def with_axes(spec: ModelSpec, shape: tuple[int, ...] | None) -> ModelSpec:
    """The same for a checkpoint whose experts' gates and ups have this shape: transformers 5 can store those that were
    published as `[experts, inputs, outputs]` with outputs first."""
    experts = spec.sparse[0]
    if shape != (experts.count, 2 * experts.width, spec.hidden) or 2 * experts.width == spec.hidden:
        return spec
    return with_experts(spec, transposed=False)


def with_experts(spec: ModelSpec, **options: bool) -> ModelSpec:
    """The same with these options of every layer's experts."""
    replace = msgspec.structs.replace
    return spec.with_layers(
        tuple(
            replace(layer, mlp=replace(layer.experts, **options)) if layer.experts is not None else layer
            for layer in spec.blocks
        )
    )


def has_head(file: ConfigFile) -> bool:
    """Whether the architecture has an output embedding. Folders may lack its weights all the same."""
    named, bases = file.get("architectures"), {family.base for family in families().values()}
    return not (isinstance(named, list) and named and all(name in bases for name in named))


def decoder_spec(file: ConfigFile, family: Family, known: Collection[str] = ()) -> ModelSpec:
    """The same of a file whose family is known. known: keys that the caller reads itself."""
    values = {family.keys.get(key, key): value for key, value in file.values.items()}
    file = ModelFile(file.path, values, family.defaults)
    refuse_unsupported(file, family)
    body = family.read(file)
    attentions = [layer.attention for layer in body.layers if layer.attention is not None]
    max_position = body.max_position or read_length(file, body)
    if file.get("is_causal") is False:
        body = both_ways(file, body)
    dynamic = max(own.rope.factor if own.rope.kind == "dynamic" else 1.0 for own in attentions)
    spec = ModelSpec(
        family=family.name,
        hidden=file.integer("hidden_size"),
        body=body,
        vocab_size=file.integer("vocab_size"),
        tied=file.flag("tie_word_embeddings"),
        max_position=max_position,
        longest=int(max_position * dynamic),
        dtype=read_dtype(file),
        names=family.names,
        unread=(*body.unread, *(ENCODERS if family.wrappers else ())),
        classifier=read_classifier(file, family, body),
    )
    refuse_unread(file, (*family.ignored, *known), family.same)
    return spec


def both_ways(file: ConfigFile, body: Body) -> Body:
    """The layers of a decoder that was trained on to be an encoder (gte-Qwen2: Li et al., 2023). Raises ModelError."""
    attentions = [layer.attention for layer in body.layers]
    if any(own is None or own.window or own.softcap or own.sinks or own.latent for own in attentions):
        why = "Penstock serves such encoders with plain attention alone: no windows, caps of scores, sinks, latents"
        raise file.error("is_causal", why)
    layers = tuple(layer.with_attention(bidirectional=True) for layer in body.layers)
    return msgspec.structs.replace(body, layers=layers)


def read_classifier(file: ModelFile, family: Family, body: Body) -> ClassifierSpec | None:
    """The head of an architecture for classification. Decoders have one product of the last state."""
    if family.sequence_classifier not in (file.get("architectures") or ()):
        return None
    if body.classifier is not None:
        return body.classifier
    labels, activation = file.labels()
    score = DenseSpec(name="score", inputs=file.integer("hidden_size"), outputs=len(labels), bias=False)
    return ClassifierSpec(kind="last", layers=(score,), labels=labels, activation=activation)


def read_length(file: ConfigFile, body: Body) -> int:
    """The length that the model serves, stretched as its rotary positions are."""
    found = file.integer("max_position_embeddings")
    ropes = [layer.attention.rope for layer in body.layers if layer.attention is not None]
    if any(rope.kind == "linear" for rope in ropes):
        return int(found * max(rope.factor for rope in ropes))
    return max(found, *(int(rope.original_max_position * rope.factor) for rope in ropes if rope.kind == "yarn"), 0)


def read_family(file: ConfigFile) -> Family:
    """The family by `architectures`, or by `model_type` in a file without it."""
    known, architectures = families(), file.get("architectures")
    if architectures is None and str(file.get("model_type")) in known:
        return known[str(file.get("model_type"))]
    named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    text = file.values.get(TEXT)
    kind = text.get("model_type") if isinstance(text, dict) else None
    if wrapped := within(named):
        return next((family for family in wrapped if kind in (family.name, *family.texts)), wrapped[0])
    classes = {name: family for family in known.values() for name in family.classes}
    for name in named:
        if name in classes:
            return classes[name]
    served = ", ".join(family.architecture for family in known.values())
    raise file.error("architectures", f"{kind_of(file)}Penstock serves {served}")


def within(named: Collection[str]) -> list[Family]:
    """Families whose text models are part of one of these classes."""
    return [family for family in families().values() if any(name in family.wrappers for name in named)]


def kind_of(file: ConfigFile) -> str:
    """What a model of an architecture that is not served may be, as the beginning of a complaint."""
    named = " ".join(map(str, file.get("architectures") or ())) or str(file.get("model_type"))
    for key, pattern, kind in FOREIGN:
        if (key and file.get(key)) or re.search(pattern, named):
            return f"this is {kind}, and "
    return ""


def refuse_unsupported(file: ConfigFile, family: Family) -> None:
    """Raise ModelError for what would be served wrongly if it were ignored."""
    if file.get("auto_map") and not family.published_code:
        raise file.error("auto_map", "the model needs code of its own, which Penstock never runs")


def read_dtype(file: ConfigFile) -> str:
    """The checkpoint's type; `torch_dtype` is the key's name before transformers 5."""
    key = "dtype" if "dtype" in file.values else "torch_dtype"
    name = file.get(key) or "float32"
    if name not in DTYPES:
        raise file.error(key, "one of " + ", ".join(DTYPES))
    return str(name)
