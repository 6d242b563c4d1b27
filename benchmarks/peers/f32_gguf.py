"""A GGUF file with every tensor in float32, for a server that can load nothing else.

    python -m benchmarks.peers.f32_gguf SOURCE TARGET

Owns the copy: metadata and names as they were, values as the blocks of SOURCE stand for, so that
they are the very weights that the others load from the safetensors folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType
from gguf.quants import dequantize

_WRITTEN_ANEW = {Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE}


def convert(source: Path, target: Path) -> None:
    """Takes some 540 MB of disk for the demo model; ``target`` is there whole or not at all."""
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    unfinished = target.with_suffix(".part")
    writer = GGUFWriter(unfinished, str(architecture))
    writer.add_file_type(LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        if name in _WRITTEN_ANEW or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
