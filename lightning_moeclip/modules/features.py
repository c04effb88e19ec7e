"""The two features in what a CLIP model of another library returns, for the losses over the global batch.

A model of open_clip, in its ``training_step``:

    image, text = paired_features(self.model(images, tokens))
    return contrastive_loss(image, text, self.model.logit_scale)

and SigLIP of transformers:

    image, text = paired_features(self.model(**batch))
    return sigmoid_loss(image, text, self.model.logit_scale, self.model.logit_bias)

The scale is the model's own parameter, a log in both libraries. What open_clip returns beside the features is already
its exponential, and what transformers returns as ``loss`` has negatives of one rank alone: neither belongs here. The
parameter stays the user's: it is trained and never clamped; ``model.logit_scale.data.clamp_(0, math.log(100))`` in
``on_train_batch_end`` does what CLIP does. ``ContrastiveLoss`` would bring another scale and leave the model's idle.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["paired_features"]

_NAMES = (("image_features", "text_features"), ("image_embeds", "text_embeds"))


def paired_features(output: Any) -> tuple[Tensor, Tensor]:
    """Features of images and of texts, as the model has left them: of unit length in both libraries.

    Args:
        output: what a model of open_clip returns, as a tuple or a dict, or an output object of transformers.

    Returns:
        Image and text features, [n, dim] each.

    Raises:
        TypeError: ``output`` holds none, or is a tuple whose places cannot be told.
        ValueError: the model was given images or texts alone.
    """
    for names in _NAMES:
        found = [_held(output, name) for name in names]
        if any(isinstance(value, Tensor) for value in found):
            return _both(found)
    if isinstance(output, tuple) and len(output) > 2:
        # open_clip: image, text and a scale. transformers without return_dict: logits, logits, text, image
        scale = output[2]
        if isinstance(scale, Tensor) and scale.numel() == 1:
            return _both(list(output[:2]))
        raise TypeError(
            f"paired_features got a tuple of {len(output)} without a scale in the third place, so that its features "
            "cannot be told apart. Call the model of transformers with return_dict=True."
        )
    told = f"a mapping with {sorted(map(str, output))}" if isinstance(output, Mapping) else f"a {type(output).__name__}"
    raise TypeError(
        f"paired_features got {told}, without image_features and text_features or image_embeds and text_embeds. Give "
        "it what a CLIP model of open_clip or transformers returns, or give the loss your two tensors."
    )


def _held(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _both(found: list[Any]) -> tuple[Tensor, Tensor]:
    image, text = found
    if isinstance(image, Tensor) and isinstance(text, Tensor):
        return image, text
    missing = "texts" if isinstance(image, Tensor) else "images"
    raise ValueError(
        f"The model returned no features of {missing}: it was called without them. A contrastive loss needs both, of "
        "the same rows."
    )
