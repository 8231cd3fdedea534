"""Training data as one global sequence of samples that knows nothing of plans or ranks.

Sample i is the same on every plan and any number of ranks: a step takes the samples
step * global_batch_size .. (step + 1) * global_batch_size - 1, and each rank asks for its slice.

Text becomes one flat array of token ids (`tokens`), cut into windows that a task makes samples of (`windows`,
`masked`, `spans`). Images (`images`) and labelled texts (`labelled`) are one sample each. Each epoch visits all
samples in an order drawn from (seed, epoch) (`order`). `prepare` opens what a plan's model is trained on.
"""

from meshwright.runtime.data.images import ImageDataset, open_images
from meshwright.runtime.data.labelled import TextClassDataset, read_labelled
from meshwright.runtime.data.masked import MaskedDataset
from meshwright.runtime.data.order import IGNORE_INDEX, Dataset, Split
from meshwright.runtime.data.spans import SpanDataset, SpanLengths
from meshwright.runtime.data.task import TaskName, choose_task
from meshwright.runtime.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from meshwright.runtime.data.tokens import TokenStore, build_tokens, open_token_file, unigram_entropy
from meshwright.runtime.data.windows import TokenDataset

__all__ = [
    "IGNORE_INDEX",
    "ByteTokenizer",
    "Dataset",
    "FileTokenizer",
    "ImageDataset",
    "MaskedDataset",
    "SpanDataset",
    "SpanLengths",
    "Split",
    "TaskName",
    "TextClassDataset",
    "TokenDataset",
    "TokenStore",
    "Tokenizer",
    "build_tokens",
    "choose_task",
    "load_tokenizer",
    "open_images",
    "open_token_file",
    "read_labelled",
    "unigram_entropy",
]
