"""Creates small Qwen3 models with random weights, and tokenizers trained on a corpus."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import Tokenizer

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant")
VISIBLE_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
"""Tags that are single tokens. The tags are not special tokens, because scorers need them in the decoded text."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}"
    + END
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def scratch_tokenizer(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that has a chat template and encodes each digit and symbol separately."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[^A-Za-z]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(VISIBLE_TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(corpus, trainer)
    fast.add_tokens(list(VISIBLE_TAGS))
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = CHAT_TEMPLATE
    return Tokenizer(hf)


def scratch_model(settings: ScratchSettings, tokenizer: Tokenizer, seed: int) -> PreTrainedModel:
    """Create a randomly initialised float32 Qwen3 model for this tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer.hf),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=settings.max_context_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.hf.eos_token_id,
        pad_token_id=tokenizer.hf.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.hf.eos_token_id
    model.generation_config.pad_token_id = tokenizer.hf.pad_token_id
    return model
