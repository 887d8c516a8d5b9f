"""Load an exported model with transformers and let it write: `from_pretrained` is all it takes.

    python examples/generate.py runs/nvfp4 --prompt "The capital of France is"

Nothing of qtensor is imported here. transformers reads the layout of compressed-tensors (`pip install
compressed-tensors`) and dequantizes the weights; inference engines run on them as they are.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig


@torch.no_grad()
def write(directory: str, prompt: str, tokens: int) -> str:
    """The prompt and what the model makes of it, always taking the likeliest token."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(written[0], skip_special_tokens=True)
    return text


def main() -> None:
    """Write a few words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="an export in the layout compressed-tensors")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    print(write(args.directory, args.prompt, args.tokens))


if __name__ == "__main__":
    main()
