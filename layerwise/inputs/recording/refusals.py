"""Why a model cannot be replayed layer by layer: the errors of a run of the parent, and the way out of each."""


def attribute_of_a_layer(name: str, fqn: str, batch: int) -> NotImplementedError:
    """Make the error of a model that sets an attribute of a layer in its forward."""
    return NotImplementedError(
        f"the model sets {name} of layer {fqn} in its forward (batch {batch}): a layer is run on one batch after the "
        "other, and would find the value of the last one; pass it as an argument"
    )


def attribute_of_a_tensor(name: str, fqn: str, attribute: str) -> NotImplementedError:
    """Make the error of a layer that is given a tensor with a Python attribute."""
    return NotImplementedError(
        f"{name} of layer {fqn} is a tensor with an attribute {attribute} that the model has set; a layer gets copies "
        "of tensors, without it: pass it as an argument"
    )


def out_of_order(fqn: str, met: str, batch: int) -> NotImplementedError:
    """Make the error of a layer that is called a second time, or before its predecessor in layers=."""
    return NotImplementedError(
        f"layer {fqn} is called {met} in one forward of the model (batch {batch}); layers must be called once each, in "
        "the order of layers="
    )


def not_called(fqn: str, batch: int) -> NotImplementedError:
    """Make the error of a forward that ended without a call of a layer."""
    return NotImplementedError(
        f"layer {fqn} was not called in the model's forward of batch {batch}; layers must be called once each, in the "
        "order of layers="
    )


def not_kept(name: str, fqn: str, needed: list[str]) -> NotImplementedError:
    """Make the error of a layer that is called with what depends on outputs from before the previous layer.

    Args:
        name: of the argument; "" if the model computes with such an output before it calls the layer.
        fqn: of the layer.
        needed: the layers whose outputs it takes, as far as they are known.
    """
    what = f"{name} of layer {fqn}" if name else f"what the model computes before it calls layer {fqn}"
    return NotImplementedError(
        f"{what} is computed from the output of {' and '.join(needed) or 'an earlier layer'}, which is not kept: "
        "between layers a model may change only the output of the layer just before. Give such layers as one module of "
        "layers=, or leave them out"
    )


def not_kept_behind(who: str, needed: list[str], last: str) -> NotImplementedError:
    """Make the error of something behind the layers that takes the output of a layer before the last."""
    return NotImplementedError(
        f"{who} takes the output of {' and '.join(needed)}, which is not kept: after the layers a model may use only "
        f"that of the last one, {last}. Give these layers as one module of layers=, or leave them out"
    )
