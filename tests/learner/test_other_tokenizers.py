"""A teacher of another tokenizer: log-probabilities of the pieces of text at whose ends both tokenizers part."""

import itertools
from dataclasses import replace

import pytest
import torch
from distilled import trained

from covey import algorithms as alg
from covey.errors import ConfigError
from covey.learner import Policy
from covey.learner.packing import Row
from covey.learner.text_alignment import read_ends
from covey.learner.token_batches import Draws, batch_of
from covey.training.teaching import build_teacher
from covey.types import Completion, Prompt, Totals
from kit import byte_tokenizer, tiny_model, tiny_tokenizer
from teacher_server import serving

TEXTS = ("The answer is 7. #### 7", "Tom has 3 äpfel, ✓ and 日本 42", "", "é", "15 pens left 🎉🎉 #### 15")


@pytest.fixture
def bytewise(tmp_path):
    """The folder of a teacher that reads bytes."""
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", seed=3, vocab_size=len(tokenizer), hidden=48, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(tmp_path / "bytes")
    tokenizer.save_pretrained(tmp_path / "bytes")
    return str(tmp_path / "bytes"), model.eval(), tokenizer


def row_of(tokenizer, text, *, ids=None, finish="stop", messages=None, counts=None, index=0, group=None):
    plain = "2 + 2 ="
    start = tokenizer(plain)["input_ids"]
    if messages:
        plain = None
        start = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    ids = torch.tensor(tokenizer(text)["input_ids"] if ids is None else ids, dtype=torch.long)
    if finish == "stop":
        ids = torch.cat([ids, torch.tensor([tokenizer.eos_token_id])])
    drawn = Completion(token_ids=ids, text=text, finish=finish)
    asked = Prompt(uid=f"0:{index}", token_ids=tuple(start), text=plain, messages=messages)
    counts = torch.ones(len(ids), dtype=torch.bool) if counts is None else counts
    return Row(
        prompt=asked,
        completion=drawn,
        group=index if group is None else group,
        advantage=torch.tensor(1.0),
        counts=counts,
        index=index,
    )


def logp_of(model, prompt, completion):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


def by_hand(row, student, model, theirs, tokenizer, prompt):
    """[T] gap of each token's span and its first token: bytes of every token counted, ends of both compared, sums subtracted."""
    ids = row.completion.token_ids.tolist()
    has_end = ids[-1] == tokenizer.eos_token_id
    table = {char: byte for byte, char in bytes_to_unicode().items()}
    width = lambda some, of: [sum(1 for c in of.convert_ids_to_tokens(one) if c in table) for one in some]
    core = ids[:-1] if has_end else ids
    text = tokenizer.decode(core)
    other = theirs(text)["input_ids"]
    mine, yours = torch.tensor(width(core, tokenizer)).cumsum(0), torch.tensor(width(other, theirs)).cumsum(0)
    letters = {len(text[:i].encode()) for i in range(len(text) + 1)}
    ends = [0, *sorted(set(mine.tolist()) & set(yours.tolist()) & letters)]
    if not has_end:
        ends = [end for end in ends if end < len(text.encode())]
    p = logp_of(student, row.prompt.token_ids, ids)
    q = logp_of(model, prompt, [*other, theirs.eos_token_id])
    gap, first = torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.long)
    for a, b in itertools.pairwise(ends):
        here = [t for t in range(len(core)) if a < mine[t] <= b]
        there = [t for t in range(len(other)) if a < yours[t] <= b]
        gap[here] = (q[there].sum() - p[here].sum()).float()
        first[here] = 1 + here[0]
    if has_end:
        gap[-1], first[-1] = q[len(other)] - p[-1], len(ids)
    return gap, first


def bytes_to_unicode():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def measured(student, teacher, rows):
    policy = Policy(student, pad_id=0)
    return batch_of(rows, policy.measure(rows, teacher=teacher), None, Draws())


def made(folder, student, tokenizer, **options):
    algorithm = alg.mopd(teacher=folder, **options)
    return build_teacher(algorithm, Policy(student, pad_id=0), tokenizer, {}, eos_ids=(tokenizer.eos_token_id,))


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_gaps_are_those_of_sums_over_the_shared_pieces(finish, bytewise):
    folder, model, theirs = bytewise
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    texts = [text for text in TEXTS if text or finish == "stop"]
    rows = [row_of(tokenizer, text, finish=finish, index=i, group=i // 2) for i, text in enumerate(texts)]
    tokens = measured(student, made(folder, student, tokenizer), rows)
    prompt = theirs("2 + 2 =")["input_ids"]
    for i, row in enumerate(rows):
        gap, first = by_hand(row, student, model, theirs, tokenizer, prompt)
        count = row.completion.num_tokens
        torch.testing.assert_close((tokens.teacher_logp - tokens.old_logp)[i, :count], gap, rtol=1e-4, atol=1e-4)
        assert tokens.teacher_span[i, :count].tolist() == first.tolist()
        assert not tokens.teacher_span[i, count:].any()
    spans = tokens.teacher_span[0]
    assert bool((spans > 0).any())


def test_the_policy_reads_bytes_and_the_teacher_words(tmp_path):
    """The other way round: a span of several tokens of the policy for each token of the teacher, and characters of several bytes."""
    model, theirs = tiny_model("llama", seed=4).eval(), tiny_tokenizer()
    model.save_pretrained(tmp_path / "words")
    theirs.save_pretrained(tmp_path / "words")
    tokenizer = byte_tokenizer()
    student = tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0).eval()
    rows = [row_of(tokenizer, text, index=i) for i, text in enumerate(TEXTS)]
    tokens = measured(student, made(str(tmp_path / "words"), student, tokenizer), rows)
    prompt = theirs("2 + 2 =")["input_ids"]
    for i, row in enumerate(rows):
        gap, first = by_hand(row, student, model, theirs, tokenizer, prompt)
        count = row.completion.num_tokens
        torch.testing.assert_close((tokens.teacher_logp - tokens.old_logp)[i, :count], gap, rtol=1e-4, atol=1e-4)
        assert tokens.teacher_span[i, :count].tolist() == first.tolist()
    assert any((tokens.teacher_span[1] == place).sum() > 1 for place in tokens.teacher_span[1].unique() if place > 0)


def test_a_message_is_read_in_the_teachers_own_template(bytewise):
    folder, model, theirs = bytewise
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    messages = ({"role": "user", "content": "2 + 2 = <end>"},)
    row = row_of(tokenizer, "The answer", messages=messages)
    tokens = measured(student, made(folder, student, tokenizer), [row])
    control = theirs.convert_tokens_to_ids(["<user>", "<bot>"])
    plain = [token for word in ("2 + 2 = ", "<", "end>") for token in theirs(word)["input_ids"]]
    gap, _ = by_hand(row, student, model, theirs, tokenizer, [control[0], *plain, control[1]])
    torch.testing.assert_close((tokens.teacher_logp - tokens.old_logp)[0], gap, rtol=1e-4, atol=1e-4)


def test_nothing_is_aligned_behind_what_the_text_does_not_hold(bytewise):
    folder, _, _ = bytewise
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    ids = lambda text: tokenizer(text)["input_ids"]
    half = tokenizer.convert_tokens_to_ids("Ã")  # the first byte of a character of two
    control = tokenizer.convert_tokens_to_ids("<|im_start|>")
    rows = [
        row_of(tokenizer, "", ids=[*ids("Tom has"), half, *ids(" 3 apples")], index=0),
        row_of(tokenizer, "", ids=[*ids("Tom has"), control, *ids(" 3 apples")], index=1),
        row_of(tokenizer, "", ids=[half], index=2),
    ]
    tokens = measured(student, made(folder, student, tokenizer), rows)
    count = len(ids("Tom has"))
    aligned = tokens.teacher_span > 0
    for i in (0, 1):
        assert aligned[i, :count].all()
        assert not aligned[i, count:].any()
    assert tokens.teacher_mask.tolist() == [True, True, False]
    gap = alg.teacher_gap(tokens)
    assert not gap[~aligned].any()
    metrics = alg.mopd(teacher="x").metrics(tokens, Totals.of(tokens.mask, tokens.group, 20))
    assert metrics["teacher/aligned"].value == pytest.approx((2 * count) / sum(r.completion.num_tokens for r in rows))
    assert metrics["teacher/informed"].value == pytest.approx(2 / 3)


def test_a_span_with_a_token_that_does_not_count_is_left_out(tmp_path):
    tokenizer = byte_tokenizer()
    tiny_model("llama", seed=4).save_pretrained(tmp_path / "words")
    tiny_tokenizer().save_pretrained(tmp_path / "words")
    student = tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0).eval()
    teacher = made(str(tmp_path / "words"), student, tokenizer)
    whole = measured(student, teacher, [row_of(tokenizer, TEXTS[0])])
    first = next(int(place) for place in whole.teacher_span[0] if (whole.teacher_span[0] == place).sum() > 2)
    here = whole.teacher_span[0] == first
    counts = torch.ones(len(here), dtype=torch.bool)
    counts[int(here.nonzero()[1])] = False
    part = measured(student, teacher, [row_of(tokenizer, TEXTS[0], counts=counts)])
    assert not part.teacher_span[0][here].any()
    assert part.teacher_span[0][~here].tolist() == whole.teacher_span[0][~here].tolist()


def test_the_gradient_is_that_of_the_divergence_of_spans(bytewise):
    """REINFORCE with a span as one action: `-(log q(span) - log p(span)) grad log p(span)`, summed over spans."""
    folder, model, theirs = bytewise
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    row = row_of(tokenizer, TEXTS[1])
    tokens = measured(student, made(folder, student, tokenizer), [row])
    gap, first = by_hand(row, student, model, theirs, tokenizer, theirs("2 + 2 =")["input_ids"])
    for algorithm in (alg.mopd(teacher="x", low=None, high=None), alg.sdpo(teacher="x")):
        loss = algorithm.loss(tokens, Totals.of(tokens.mask, tokens.group, 20))
        [value] = torch.autograd.grad(loss, tokens.logp, retain_graph=True)
        torch.testing.assert_close(value[0], -gap * (first > 0) / row.completion.num_tokens, rtol=1e-4, atol=1e-5)


def test_gaps_against_the_policy_of_now_move_by_the_whole_span(bytewise):
    folder, _, _ = bytewise
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    tokens = measured(student, made(folder, student, tokenizer), [row_of(tokenizer, TEXTS[1])])
    moved = replace(tokens, logp=tokens.logp + 0.01 * torch.arange(tokens.logp.shape[1]))
    gaps = {against: alg.teacher_gap(moved, against)[0] for against in ("old", "current")}
    for place in tokens.teacher_span[0].unique().tolist():
        here = tokens.teacher_span[0] == place
        change = (moved.logp - tokens.logp)[0, here].sum() if place else 0.0
        torch.testing.assert_close(gaps["current"][here], gaps["old"][here] - change)


def test_a_served_teacher_of_another_tokenizer_is_the_same_as_one_that_is_loaded(bytewise):
    folder, model, theirs = bytewise
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    rows = [row_of(tokenizer, text, index=i) for i, text in enumerate(TEXTS)]
    here = measured(student, made(folder, student, tokenizer), rows)
    with serving(model, theirs) as (url, _):
        role = {"served_model_name": "big", "teacher_tokenizer_name_or_path": folder}
        there = measured(student, made(url, student, tokenizer, **role), rows)
        with pytest.raises(ConfigError, match="teacher_tokenizer_name_or_path='FOLDER or hub id'"):
            made(url, student, tokenizer, served_model_name="big")
    torch.testing.assert_close(there.teacher_logp, here.teacher_logp, rtol=1e-4, atol=1e-4)
    assert there.teacher_span.tolist() == here.teacher_span.tolist()
    assert there.teacher_mask.tolist() == here.teacher_mask.tolist()


def test_a_column_chooses_between_teachers_of_two_tokenizers(bytewise, tmp_path):
    folder, _, _ = bytewise
    tiny_model("llama", seed=4).save_pretrained(tmp_path / "same")
    tiny_tokenizer().save_pretrained(tmp_path / "same")
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    rows = [row_of(tokenizer, TEXTS[i], index=i) for i in (0, 1)]
    named = [
        replace(row, prompt=replace(row.prompt, columns={"kind": kind}))
        for row, kind in zip(rows, ("bytes", "same"), strict=True)
    ]
    both = measured(
        student, made({"bytes": folder, "same": str(tmp_path / "same")}, student, tokenizer, by="kind"), named
    )
    alone = [measured(student, made(one, student, tokenizer), rows) for one in (folder, str(tmp_path / "same"))]
    torch.testing.assert_close(both.teacher_logp[0], alone[0].teacher_logp[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.teacher_logp[1], alone[1].teacher_logp[1], rtol=1e-4, atol=1e-5)
    assert both.teacher_span[0].tolist() == alone[0].teacher_span[0].tolist()
    teacher = made({"bytes": folder, "same": str(tmp_path / "same")}, student, tokenizer, by="kind")
    apart = [measured(student, teacher, [row]) for row in named]  # a micro-batch of one kind has the same fields
    assert set(apart[0].tensors()) == set(apart[1].tensors()) == set(both.tensors())
    count = rows[1].completion.num_tokens
    assert both.teacher_span[1, :count].tolist() == list(range(1, count + 1))


def test_what_another_tokenizer_cannot_teach_is_refused(bytewise):
    folder, _, _ = bytewise
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    policy = Policy(student, pad_id=0)
    whole = alg.dapo().replace(regularizers=alg.distill(folder))
    with pytest.raises(ConfigError, match=r"another vocabulary.*mopd, iw_opd, rlsd, sdar, sdpo"):
        build_teacher(whole, policy, tokenizer, {})
    with pytest.raises(ConfigError, match="by='COLUMN'"):
        made([folder, folder], student, tokenizer)
    with pytest.raises(ConfigError, match="leave it out"):
        alg.mopd(teacher_tokenizer_name_or_path=folder)


def test_a_start_names_the_teacher_and_how_much_it_reads(bytewise, caplog):
    folder, _, _ = bytewise
    made(folder, tiny_model("qwen2").eval(), tiny_tokenizer())
    assert "reads 100% of the policy's tokens, and teacher/aligned is the share" in caplog.text


@pytest.mark.slow
def test_a_run_comes_nearer_to_a_teacher_of_another_tokenizer(bytewise, tmp_path):
    folder, _, _ = bytewise
    curve = trained(tmp_path / "run", alg.mopd(teacher=folder))
    assert all(0 < entry["teacher/aligned"] <= 1 for entry in curve)
    assert curve[-1]["teacher/gap"] > 0.8 * curve[0]["teacher/gap"]  # both below 0


@pytest.mark.parametrize(
    "ids, text, ends",
    [
        ([[65], [66]], "AB", {0: 0, 1: 1, 2: 2}),
        ([[0xE2], [0x9C], [0x93]], "✓", {0: 0, 1: 3}),
        ([[65], [0xC3], [65]], "A\N{REPLACEMENT CHARACTER}A", {0: 0, 1: 1, 2: 2, 3: 3}),
        ([[65], [66]], "AC", {0: 0, 1: 1}),
    ],
)
def test_ends_between_characters_are_counted_and_others_are_not(ids, text, ends):
    tokenizer = byte_tokenizer()
    table = bytes_to_unicode()
    tokens = tokenizer.convert_tokens_to_ids([table[byte] for part in ids for byte in part])
    assert read_ends(tokenizer, (), tokens, text) == ends
