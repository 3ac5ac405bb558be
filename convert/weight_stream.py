"""Loading a model from checkpoint tensors that arrive one at a time, as inference engines and trainers send them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.convert.ranks import stand_in
from ligermodels.convert.shards import own_parts
from ligermodels.convert.weight_map import FLOATS, UNCASTABLE, WeightMap
from ligermodels.errors import CheckpointError


class _Part(NamedTuple):
    """The part of the native tensor `target` that holds rows of a checkpoint tensor, from row `start` on; of a DTensor
    as a view of a stand-in for the whole tensor."""

    target: str
    tensor: Tensor
    part: Tensor
    shape: tuple[int, ...]
    start: int

    @property
    def place(self) -> tuple[object, ...]:
        """Which elements of which native tensor the rows go to."""
        return self.target, self.part.storage_offset(), self.part.stride(), self.part.shape, self.start

    def own(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """This rank's elements of the part, and of `values` for all of it: see `own_parts`."""
        try:
            return own_parts(self.tensor, self.part, values.reshape(self.part.shape))
        except CheckpointError as error:
            raise CheckpointError(f"{self.target}: {error}") from None


class _Layout:
    """The parts of a model's tensors that each checkpoint tensor of one weight map fills."""

    def __init__(self, weight_map: WeightMap, state: Mapping[str, Tensor]) -> None:
        self.weight_map = weight_map
        parts: defaultdict[str, list[_Part]] = defaultdict(list)
        for mapping in weight_map.mappings:
            tensor = state[mapping.target]
            for view, part in mapping.split(stand_in(tensor)):
                parts[view.source].append(_Part(mapping.target, tensor, part, view.shape(part), view.start))
        self.parts = dict(parts)

    def source(self, name: str) -> str:
        """The checkpoint tensor that `name` stands for: `name`, or the tensor that this alias repeats."""
        return self.weight_map.aliases.get(name, name)

    def shape(self, source: str) -> tuple[int, ...]:
        """The whole shape of a checkpoint tensor."""
        shapes = [part.shape for part in self.parts[source]]
        return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether the layout has a checkpoint tensor of this name and shape, or leaves this name out."""
        source = self.source(name)
        if source in self.parts:
            return self.shape(source) == tuple(tensor.shape)
        return self.weight_map.ignores(name)

    def places(self, source: str) -> set[tuple[object, ...]]:
        """Where the elements of a checkpoint tensor go."""
        return {part.place for part in self.parts[source]}


class WeightStream:
    """Copies checkpoint tensors into a model one at a time, in any order, with the model's casts.

    Args:
        layouts: weight maps by which the tensors may be named and shaped, the preferred one first. The first layout
            that fits all tensors so far is used, and later tensors must not contradict it.
        state: native name -> tensor with memory. They are written in place, so CUDA graphs and other references to
            them stay valid. Of a DTensor, each rank writes its own shard.

    Examples:
        >>> import ligermodels as lm
        >>> from ligermodels.convert.weight_stream import WeightStream
        >>> config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
        >>> trained, served = lm.from_config(config), lm.from_config(config)
        >>> stream = WeightStream([served.config.weight_map()], dict(served.named_parameters()))
        >>> for bucket in trained.iter_hf_weights():
        ...     for name, tensor in bucket:
        ...         stream.load(name, tensor)
        >>> stream.missing()
        []
    """

    def __init__(self, layouts: Sequence[WeightMap], state: Mapping[str, Tensor]) -> None:
        self._every = [_Layout(weight_map, state) for weight_map in layouts]
        self.begin()

    def begin(self) -> None:
        """Forget which tensors have been loaded, and in which layout: the next tensors may come in another one."""
        self._layouts = self._every
        self._loaded: dict[str, set[str]] = {}  # tensor -> the names under which its present values came

    @torch.no_grad()
    def load(self, name: str, tensor: Tensor) -> None:
        """Copy one checkpoint tensor into the model.

        A tensor that the weight maps leave out (draft heads, a vision tower) is skipped. The second of two tied tensors
        must equal the first. A tensor that comes again under its name replaces the values that came before.

        Args:
            name: name of the tensor in the checkpoint.
            tensor: the whole tensor, on any device, in a float dtype or in the model's.

        Raises:
            CheckpointError: the name is unknown, or the shape, the dtype or the value does not fit. Tensors that were
                loaded before stay loaded.
        """
        layout = self._layout_for(name, tensor)
        source = layout.source(name)
        if source not in layout.parts:
            return
        for part in layout.parts[source]:
            native = part.part.dtype
            if tensor.dtype != native and not {tensor.dtype, native} <= FLOATS:
                raise CheckpointError(f"{name}: {tensor.dtype} is {UNCASTABLE}")
        names = self._loaded.get(source, set())
        if name in names:  # of another update
            names = set()
        for part in layout.parts[source]:
            rows = tensor if len(layout.parts[source]) == 1 else tensor[part.start : part.start + part.shape[0]]
            for own, values in part.own(rows):
                if names and not torch.equal(own, values.to(own)):
                    raise CheckpointError(
                        f"{name}: differs from {', '.join(names)}, to which the config ties it; set "
                        "tie_word_embeddings to false"
                    )
                own.copy_(values)
        self._loaded[source] = names | {name}

    def _layout_for(self, name: str, tensor: Tensor) -> _Layout:
        """The first layout that fits this tensor and all earlier ones; drops the layouts that do not fit."""
        fitting = [layout for layout in self._layouts if layout.takes(name, tensor)]
        if not fitting:
            named = [layout for layout in self._layouts if layout.source(name) in layout.parts]
            shapes = {layout.shape(layout.source(name)) for layout in named}
            expected = " or ".join(str(list(shape)) for shape in sorted(shapes))
            reason = f"of shape {list(tensor.shape)} instead of {expected}" if shapes else "not expected"
            raise CheckpointError(f"the weights do not fit the model: {name} is {reason}")
        first, chosen = self._layouts[0], fitting[0]
        for source in self._loaded if chosen is not first else ():
            if chosen.places(source) != first.places(source):
                raise CheckpointError(
                    f"{name}: is of another layout than {source}, which came before it; send all weights in one layout"
                )
        self._layouts = fitting
        return chosen

    def missing(self) -> list[str]:
        """Checkpoint names of the tensors that have not been loaded yet."""
        return [source for source in self._layouts[0].parts if source not in self._loaded]

    def loaded(self) -> set[str]:
        """Native names of the tensors whose parts have all been loaded."""
        parts = self._layouts[0].parts
        incomplete = {part.target for source in self.missing() for part in parts[source]}
        return {mapping.target for mapping in self._layouts[0].weight_map.mappings} - incomplete
