"""Every exercise of every lesson: its folded solution passes its checker, and typical wrong answers are told what is wrong.

An exercise is four things in a row: a markdown cell that begins with `**1. Title** (easy, 10 minutes)` and says what function
`name` to write; a code cell with `check_name(name)`, which returns "right" or raises an AssertionError that names the fault; a
folded hint; a folded solution with a block of python that defines `name`. Of the lesson only the cells run that a checker and
its solution need."""

import ast
import importlib
import json
import re
import symtable
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parent.parent / "nbs"
STATEMENT = re.compile(r"\*\*(\d)\. [^*]+\*\* \((easy|medium|hard), \d+ minutes\)\.? ")
FOLDED = r"<details><summary>{}</summary>\n\n(.*?)\n</details>"

# Of each checker, wrong answers: (an expression, what the message says), or (a part of the solution, what stands there
# instead, what the message says).
WRONG = {
    "core": {
        "write_lines": [("atomic_path(path) as temporary, open(temporary", "open(path", "the old file became"),
                        ("lambda path, lines: Path(path).write_text('\\n'.join(lines))", "Alien")],
        "table_hash": [("content_hash", "the order of rows"),
                       (".sort_values(list(table.columns))", ".title.sort_values()", "another year"),
                       ("table.sort_values(list(table.columns))", "table.apply(sorted)", "which title has which year"),
                       ("content_hash(table.sort", "content_hash(table.drop_duplicates().sort", "there twice")],
    },
    "00_data": {
        "split_at": [("lambda events, moment: (events[events.timestamp < moment], events[events.timestamp >= moment].drop_duplicates('user_id'))",
                      "no training event"), (' & ordered["user_id"].isin(train["user_id"])', "", "no training event"),
                     ('.drop_duplicates("user_id")', "", "tested twice"),
                     ('drop_duplicates("user_id")', 'drop_duplicates("user_id", keep="last")', "isn't its user's first"),
                     ("< moment]", "<= moment]", "on the wrong side")],
        "my_data": [('"Lamp"', '" "', "title"), ('list("abcdea")', 'list("abcdez")', "row 6"),
                    ('list("uuuvvw")', 'list("uuuvvv")', "2 people")],
    },
    "01_encode": {
        "centred": [("lambda vectors: vectors", "the mean cosine"),
                    ("lambda vectors: vectors - vectors.mean(0)", "lengths go from"),
                    ("lambda vectors: to_unit(vectors) - to_unit(vectors).mean(0)", "lengths go from"),
                    ("vectors.mean(0)", "vectors.mean(1, keepdims=True)", "the mean cosine")],
        "my_text": [("lambda items: items.item_id.tolist()", "the item's id"),
                    ("lambda items: items.title.tolist()[:-1]", "299 texts"),
                    ("lambda items: [''] + items.title.tolist()[1:]", "has no text")],
    },
    "02a_quantizer": {
        "decode": [("lambda codebooks, codes: codebooks[0][codes[:, 0]]", "the vectors are off"),
                   ("lambda codebooks, codes: codebooks[-1][codes[:, -1]] + codebooks[:-1].sum(1).mean(0)",
                    "the vectors are off")],
        "best_pairs": [("lambda z, first, second: placed(z).codes[:, :2]", "these are the greedy pairs"),
                       ("index // len(second), index % len(second)",
                        "index % len(second), index // len(second)", "rows have a worse pair")],
        "exact_shares": [("lambda distances: distances.argmin(1)", "a code has"),
                         ("lambda distances: torch.arange(len(distances)) % distances.shape[1]", "the total distance")],
    },
    "02b_rqvae": {
        "neighbour_agreement": [("    np.fill_diagonal(similarity, -np.inf)", "    pass", "not 1.0"),
                                ("codes[:, 0]).mean()", "codes[:, 1]).mean()", "0.5, not")],
        "errors_by_depth": [("z = z + book", "z = book", "the model's own is"),
                            (" * model.scale + model.centre", "", "the model's own is"),
                            ("lambda model, vectors: [model.reconstruction_error(vectors)]", "3 levels and 1 errors")],
    },
    "03_semantic_ids": {
        "auc_of": [(" + (score(near) == score(rest)) / 2", "", "do ties count half"),
                   (" if other != item", "", "is the film itself left out")],
        "permuted_within": [("rng.permutation(rows)", "rows", "most items kept their codes"),
                            ("sids.codes.copy()", "sids.codes", "have changed"),
                            ("groups == group", "groups >= 0", "has other codes")],
        "branching": [("np.mean([len(children) for children in below])",
                       "sum(len(children) for children in below)", "[2, 2], not"),
                      ("lambda trie: [len(np.unique(trie.rows[:, level])) for level in range(trie.levels)]", "[2, 2], not")],
    },
    "04_vocabulary": {
        "stale": [("lambda model, tokenizer, names: []", "spare rows"), ("< rows]", "<= rows]", "spare rows"),
                  (" len(tokenizer) + i", " i", "spare rows")],
        "moved": [("    if before.head_rows is not None:", "    if False:", "one head row moved"),
                  (".any(-1)", ".all(-1)", "one row moved"), ("lambda before, after: before.names", "nothing moved")],
    },
    "05_initializers": {
        "title_mean": [('@initializer("title_mean")', "", "is registered"),
                       ('.assign(description="")', "", "isn't the mean of its")],
        "distinct": [(".bfloat16().float()", "", "a millionth apart"), ("len", "torch.numel", "of equal rows"),
                     ("lambda rows: 1", "a hundredth apart")],
    },
    "06_geometry": {
        "fool": [("lambda base_rows: np.random.default_rng(0).normal(size=(50, base_rows.shape[1]))", "mean_cosine is"),
                 ("[:50]", "[:40]", "40 rows"),
                 ("lambda base_rows: np.repeat(np.asarray(base_rows[:1]), 50, 0)", "mean_cosine is 1.00")],
        "cka": [("rsa", "not"), (" - np.asarray(side).mean(0)", "", "should give 1"), (" ** 2", "", "should give 1")],
    },
    "07_prompts": {
        "wording": [("lambda text: f'After {text[:11]}, what?'", "the prompt has the codes"),
                    ("lambda text: f'After {text}, why not <a_1><b_1>?'", "the prompt has the codes")],
        "fitting": [("<= most", "< most", "nothing came back"),
                    ("history, max_history", "history[:n], max_history", "not the last ones"),
                    ("if len(example.prompt_ids) <= most", "if True", "were allowed")],
    },
    "07b_tasks": {
        "quarter": [("MULTITASK", "of the answer tokens"), ("VANILLA", "0% of the answer tokens")],
        "search": [("TaskSettings(wordings=['I liked {history}.'])", "it should use"),
                   ("TaskSettings()", "give one question")],
    },
    "08_training": {
        "linear": [("learning_rate_at", "at step 99"),
                   ("config.steps - step", "config.steps - step - 1", "at step 20"),
                   ("lambda step, config: config.learning_rate * (config.steps - step) / config.steps", "at step 0")],
        "early_stop": [("lambda history, patience: history.validation.iloc[-1] > history.validation.min()", "isn't two"),
                       (".dropna()", "", "isn't two"),
                       ("iloc[-patience:].min()", "iloc[-patience:].max()", "the best so far")],
    },
    "08b_processes": {
        "deal": [("sorted(lengths, reverse=True)", "lengths", "the longest goes first"),
                 ("sorted(lengths, reverse=True)", "sorted(lengths)", "the longest goes first"),
                 ("lambda lengths, processes: [sum(lengths) / processes] * processes", "the longest goes first"),
                 ("lambda lengths, processes: [sum(lengths)]", "2 processes, and 1 numbers"),
                 ("ordered[i::processes]", "ordered[i:i + processes]", "tokens were dealt")],
        "fair": [("sum(part)", "len(part)", "[[3, 4], [7]]"), ("lambda parts: True", "[[3], [4]]")],
    },
    "09_grounding": {
        "moved_by": [("lambda clip: 1.0", "the norms are"),
                     ("scale(grad) / scale(grad[lm.new_ids])", "scale(grad[lm.new_ids]) / scale(grad)", "the norms are")],
        "unknown": [("lambda lm, examples, sids: [e.prompt_ids for e in examples]", "isn't among"),
                    ("< 1]", "== 1]", "SIDs are wrong"), ("lambda lm, examples, sids: []", "and 0 prompts")],
    },
    "10_sft": {
        "n_examples": [("lambda train: sum(map(len, train.values()))", "not 0"),
                       ("max(0, len(items) - 1)", "len(items) - 1 if len(items) > 2 else 0", "not 3")],
        "adapter_size": [(" + m.out_features", "", "for r = 1"),
                         ("name.endswith(PROJECTIONS)", "hasattr(m, 'in_features')", "for r = 1"),
                         ("r * (m", "(m", "for r = 4")],
    },
    "11_decoding": {
        "beams_needed": [("lambda prompt: 1", "the best SID is missed"), ("lambda prompt: 64", "and so do fewer")],
        "unseen": [("not in seen", "in seen", "of the seen ones are back"),
                   ("beams=len(rest)", "beams=5", "5 came back"), ("[0, :10]", "[0, 1:11]", "aren't the ten best"),
                   ("lambda prompt, seen: [tuple(c) for c in beam_search(lm, [prompt], sids, beams=10).codes[0].tolist() if tuple(c) not in seen]",
                    "3 came back")],
    },
    "12_evaluation": {
        "item_recall": [("lambda beams, items_of, targets, k: np.mean([any(t in items_of[s] for s in sids) for sids, t in zip(beams, targets)])",
                         "z has rank 3"),
                        ("list(dict.fromkeys(item for sid in sids for item in items_of[sid]))",
                         "[item for sid in sids for item in items_of[sid]]", "takes no second rank"),
                        ("for sid in sids for", "for sid in sids[:1] for", "w has rank 4"),
                        ("for sid in sids for", "for sid in sorted(sids) for", "behind the item of the better SID"),
                        ("np.mean(hits)", "np.sum(hits)", "it should be 0.5")],
        "average_precision": [("/ len(right)", "/ max(1, len(ranks))", "right are ['q', 'z']"), ("(n + 1) / r", "1 / r", "right are ['x', 'z']")],
        "paired_interval": [("b[users]", "b[rng.integers(0, len(b), len(b))]", "is it the same users for both?"),
                            ("rng.integers(0, len(a), len(a))", "rng.permutation(len(a))", "all draws are alike"),
                            ("[0.025, 0.975]", "[0.05, 0.95]", "wide, it should be about"),
                            ("a[users] - b[users]", "b[users] - a[users]", "doesn't hold the mean difference")],
    },
    "12b_paper": {
        "hits_needed": [("<= 0.05", "<= 0.01", "and so are"), ("<= 0.05", "<= 0.2", "have a p-value")],
        "chance_level": [("lambda pools: (pools.grade == 'good').mean()", "for more than a small one"),
                         ('pools.grade == "good"', 'pools.grade != "not"', "on average 0.375")],
    },
    "13a_config": {
        "differs": [("lambda arms: {name: ['grounding'] for name in list(arms)[1:]}", "every arm is compared with the first"),
                    ("getattr(arms[first], k)", "getattr(arms[others[0]], k)", "every arm is compared with the first"),
                    ("for name in others", "for name in arms", "you say {'a': []")],
        "fair": [("lambda arms: arms", "one control, of gti"), ("in grounded.items()", "in arms.items()", "one control, of gti"),
                 (', "equal_compute": True', "", "without equal_compute"), ('"grounding": False, ', "", "a control doesn't ground"),
                 ("s | {\"grounding", "{\"grounding", "its other settings")],
    },
    "13b_stages": {
        "stale": [("lambda before, after: []", "7 stages"), ("!=", "==", "stages are stale"),
                  ("lambda before, after: [name for name, stage in Run(before).stages.items()"
                   " if any(getattr(before, k) != getattr(after, k) for k in stage.reads)]", "all that use them")],
        "usable": [("lambda run: [name for name in run.stages if run.is_done(name)]", "only data has all that it uses"),
                   ("run.is_done(name) and ", "", "are done, and you say"),
                   ("all(used in found", "any(used in found", "are done, and you say")],
    },
    "13c_pipeline": {
        "shares": [(" / seconds.sum()", "", "shares add up to 1"), ('name.partition("-")[0]', "name", "the kinds are"),
                   ('.partition("-")', '.rpartition("-")', "the kinds are"), (".sum() /", ".mean() /", "shares add up to 1")],
        "other_versions": [("lambda a, b: {}", "torch was 2.9"), ("in a | b", "in a", "only in the second"),
                           ("(a.get(name), b.get(name)) for", "(b.get(name), a.get(name)) for", "torch was 2.9"),
                           (" if a.get(name) != b.get(name)", "", "the same record twice")],
    },
    "13d_diagnosis": {
        "collapsed": [("lambda rows, base: geometry_report(rows)['mean_cosine'] > 0.99", "a healthy cloud far from the origin"),
                      ("lambda rows, base: geometry_report(rows)['effective_rank_centered'] < 5", "a thousandth of noise"),
                      ("lambda rows, base: geometry_report(rows, base)['norm_ratio'] < 0.1", "a thousandth of noise"),
                      ("lambda rows, base: True", "a healthy cloud: True")],
        "by_rank": [("(ranks(one), ranks(other))", "(one, other)", "is Pearson's correlation"),
                    ("(len(side), 1)", "(len(side), 0)", "each pair of different rows once"),
                    ("values.argsort().argsort()", "values.argsort()", "its rank among all pairs")],
        "films_of": [(" / np.maximum(carries.sum(0), 1)[:, None]", "", "the row of <a_0>"), ("codes.T]", "codes.T[::-1]]", "the row of <a_0>"),
                     ("np.arange(codebook_size)", "np.arange(codebook_size - 1)", "it should be (6, 3)")],
    },
    "13e_sweep": {
        "settings_of": [("lambda grid: [dict(zip(grid, values)) for values in zip(*grid.values())]", "stands for 4 settings, not 2"),
                        ("lambda grid: [{name: value} for name, values in grid.items() for value in values]", "in another order"),
                        ("for setting in settings for value in values", "for value in values for setting in settings", "in another order"),
                        ("settings = [{}]", "settings = [{}] if grid else []", "{} stands for 1 settings, not 0")],
        "gain_over_seeds": [("[a[seed] - b[seed] for seed in a]", "[x - y for x, y in zip(a.values(), b.values())]", "should fall out"),
                            (".std(ddof=1)", ".std()", "three seeds are few"),
                            ("student.ppf(0.975, len(gains) - 1)", "1.96", "three seeds are few"),
                            ("a[seed] - b[seed]", "b[seed] - a[seed]", "the mean gain is 0.02")],
    },
    "13f_costs": {
        "by_hand": [("tokens**2", "tokens", "a pair of tokens costs"), ("+ 2 * key", "+ 2 * query", "for each number in the matrices"),
                    ("3 * shape.inner", "2 * shape.inner", "for each number in the matrices"),
                    ("(2 * matrices", "(matrices", "for each number in the matrices")],
        "largest": [(' - 16 * trained_parameters(shape, 1024, "lora")', "", "weights and state take"),
                    ("max(0, int", "min(10**9, int", "12 GB, 60 tokens"), ("(tokens * layer_bytes", "(layer_bytes", "it should be"),
                    ('"lora"))))', "None))))", "it should be")],
    },
    "13g_counts": {
        "padded": [("lambda lengths, micro: sum(lengths)", "[5, 9, 2, 7], 2 at a time"), ("sorted(lengths, reverse=True)", "lengths", "it should be 28"),
                   ("run[0] * len(run)", "run[0] * micro", "[30, 1, 30, 1, 30], 2 at a time")],
        "all_tokens": [("lambda kinds, lengths, counts: lengths.mean() * sum(counts.values())", "it should be 11,000"),
                       (".mean()", ".sum()", "it should be 11,000"), ("n * lengths", "lengths", "it should be 11,000")],
    },
    "13h_plan": {
        "ring": [("if r < n - 1 else came", "", "has a wrong sum"), ("range(2 * (n - 1))", "range(n - 1)", "has a wrong sum"),
                 ("(gpu - r) % n", "gpu", "has a wrong sum"),
                 ("lambda pieces: (np.tile(pieces.sum(0), (len(pieces), 1)), len(pieces)**2)", "2 are enough")],
        "worth": [("2 * (n - 1) / n", "2", "exchange 12"), ("2 * (n - 1) / n * exchange", "n * exchange", "exchange 12"),
                  ("host +", "host / n +", "host 10, exchange 0: 64 GPUs"), ("0.75", "0.5", "it should be 16")],
    },
    "14_explore": {
        "block_means": [("lambda unit, size: (unit @ unit.T).reshape(len(unit) // size, size, -1, size).mean((1, 3))", "MB at once"),
                        (" / size**2", " / size", "the mean of blocks"),
                        ("lambda unit, size: block_cosines(unit, np.arange(len(unit)), *[np.arange(0, len(unit) + 1, size)] * 2)",
                         "the mean of blocks"),
                        ("lambda unit, size: unit @ unit.T", "have means (3, 3)")],
        "fair_scale": [("lambda panels: (min(map(np.nanmin, panels)), max(map(np.nanmax, panels)))", "0 isn't in the middle"),
                       ("lambda panels: (-1.0, 1.0)", "colours are wasted"),
                       ("np.nanmax(np.abs(panel))", "np.nanmax(panel)", "is cut off"),
                       ("np.nanmax(np", "np.max(np", "0 isn't in the middle")],
    },
    "14b_explorer": {
        "parent_share": [("counts.max() / counts.sum()", "1 / len(counts)", "not 50%"),
                         ("counts.max() / counts.sum()", "counts.max() / len(codes)", "not 40%"),
                         ("codes[:, 1]", "codes[:, 0]", "codes 0 and 1 are used")],
        "block_maxima": [("        cosines[np.arange(size), start + np.arange(size)] = -2\n", "", "a token met itself"),
                         ("start + np.arange(size)", "np.arange(size)", "a token met itself"),
                         ("lambda unit, size: (unit @ unit.T - 3 * np.eye(len(unit))).reshape(len(unit) // size, size, -1, size).max((1, 3))",
                          "MB at once"),
                         ("size).max(1)", "size).mean(1)", "the maximum of blocks")],
    },
    "14c_screen": {
        "bytes_for": [("lambda rows, columns: 2 * 4 * rows * columns", "two heatmaps of 224 by 224 cells"),
                      ("math.ceil(4 * rows * columns / 3)", "(4 * rows * columns // 3)", "two heatmaps of 224 by 224 cells"),
                      ("2 * 4", "4", "two heatmaps of 224 by 224 cells")],
        "small": [("np.rint(127 * cosines)", "(127 * cosines)", "comes back as"),
                  ("127 *", "128 *", "comes back as"), (".astype(np.int8)", "", "are float64"),
                  ("np.int8", "np.int16", "are int16")],
    },
    "14d_app": {
        "key_of": [("lambda choice: choice", "other tokens lit: the cells are the same"),
                   (", choice.window", "", "another window: the cells are others"),
                   ("tuple(choice.panels)", "choice.left, choice.right", "the slider moved: the cells are others"),
                   ("tuple(choice.panels)", "choice.left, choice.right, choice.moment", "both sides keep moments of their own"),
                   ("lambda choice: object()", "equal choices have different keys")],
        "drawn": [("lambda moves, wait: [shown for _, shown in moves]", "['c', 'e'] are drawn"),
                  (" + [math.inf]", "", "['c', 'e'] are drawn, not ['c']"),
                  ("lambda moves, wait: [moves[-1][1]]", "['c', 'e'] are drawn, not ['e']")],
    },
    "14e_check_env": {
        "recent": [("number(found) >= number(least)", "found >= least", "2.10 is new enough"),
                   ("problem: {least}", "{least}", "should begin with"),
                   (": make install", "", "what helps"),
                   ("lambda found, least: (found, '')", "2.8.0 is too old")],
        "visible": [("lambda listed, setting: listed", "it should be 2"),
                    ("    if setting is None:\n        return listed\n", "    setting = setting or '0,1,2,3'\n", "it should be 0"),
                    ("lambda listed, setting: listed if setting is None else len([n for n in setting.split(',') if n])", "it should be 0"),
                    ("lambda listed, setting: listed if setting is None else sum(n in map(str, range(listed)) for n in setting.split(','))",
                     "it should be 1")],
    },
    "15_cli": {
        "words_of": [("lambda grid: ['--grid', 'beams=20']", "are read as"), ("','.join", "' '.join", "are read as"),
                     ('("--grid", f"{name}={\',\'.join(map(str, values))}")', '(f"{name}={\',\'.join(map(str, values))}",)', "needs a --grid")],
        "all_or_first": [("lambda commands, main: max(main(words) for words in commands)", "3 commands were started"),
                         ("except SystemExit as end", "except KeyboardInterrupt as end", "bad good: SystemExit"),
                         ("if code:", "if code == 1:", "stopped failed: 1"), ("code = end.code", "code = 1", "bad good: 1")],
    },
}


SHORTER = {"RQVAEConfig(steps=150)": "RQVAEConfig(steps=40)", "RQVAEConfig(steps=250)": "RQVAEConfig(steps=60)",
           "RQVAEConfig()": "RQVAEConfig(steps=150)"}  # trainings, for this test


def cells_of(name: str) -> list:
    "(is it code, source) of each cell of a lesson, in which less is trained."
    cells = json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    for long, short in SHORTER.items():
        sources = [source.replace(long, short) for source in sources]
    return [(cell["cell_type"] == "code", source) for cell, source in zip(cells, sources)]


def names(source: str) -> tuple[set, set]:
    "The names that `source` gives a value at its top level, changes of parts included, and the global ones that it reads."
    top = symtable.symtable(source, "cell", "exec")
    given = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            given |= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    read, tables = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}, list(top.get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return given, read


def exercises_of(cells: list) -> list[dict]:
    "The exercises of a lesson: statement, checker (source and name), hint, solution."
    start = next(k for k, (_, source) in enumerate(cells) if source.startswith("## Exercises"))
    found = []
    for code, source in cells[start + 1:]:
        if not code and STATEMENT.match(source):
            found.append(dict(statement=source, code=[], folded=""))
        elif code:
            found[-1]["code"].append(source)
        elif not source.startswith("**Next:**"):
            found[-1]["folded"] += source + "\n\n"
    for exercise in found:
        exercise["name"] = re.findall(r"^def check_(\w+)\(", "\n".join(exercise["code"]), re.MULTILINE)
        for part in ("Hint", "Solution"):
            exercise[part] = "\n".join(re.findall(FOLDED.format(part), exercise["folded"], re.DOTALL))
        exercise["answer"] = "\n".join(re.findall(r"```python\n(.*?)```", exercise["Solution"], re.DOTALL))
    return found


def prepared(cells: list, needed: str) -> dict:
    "The names of a lesson after those of its cells that `needed`, source text, stands on."
    codes = [source for code, source in cells[:next(k for k, c in enumerate(cells) if c[1].startswith("## Exercises"))] if code]
    module = next((m[1] for source in codes if (m := re.match(r"#\| default_exp (\w+)", source))), None)
    wanted, chosen = names(needed)[1], []
    for source in reversed(codes):
        if "#| export" in source[:60]:
            continue
        is_import = all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body)
        given, read = names(source)
        if is_import or given & wanted:
            wanted = wanted - given | read
            chosen.append(source)
    space = {"__name__": "lesson", "display": lambda *args, **kwargs: None}
    exported = vars(importlib.import_module(f"gti_nb.{module}")) if module else {}
    space |= {name: value for name, value in exported.items() if not name.startswith("__")}
    for source in reversed(chosen):
        exec(compile(source, "a cell of the lesson", "exec"), space)
    return space


def answered(exercise: dict, space: dict, wrong: tuple | None = None):
    "What the checker says of the folded solution, or of a `wrong` answer."
    space = dict(space)
    for source in exercise["code"]:
        exec(source, space)
    if wrong and len(wrong) == 2:
        answer = eval(wrong[0], space)
    else:
        assert not wrong or wrong[0] in exercise["answer"], f"the solution has no {wrong[0]!r}"
        exec(exercise["answer"].replace(*wrong[:2]) if wrong else exercise["answer"], space)
        answer = space[exercise["name"][0]]
    return space["check_" + exercise["name"][0]](answer)


@pytest.mark.parametrize("lesson", WRONG)
def test_exercises(lesson, capsys, monkeypatch):
    monkeypatch.setenv("IN_TEST", "1")
    cells = cells_of(lesson)
    exercises = exercises_of(cells)
    assert 2 <= len(exercises) <= 3
    assert {name for exercise in exercises for name in exercise["name"]} == set(WRONG[lesson])
    for exercise in exercises:
        assert len(exercise["name"]) == 1, f"one checker, please: {exercise['statement']}"
        assert exercise["Hint"] and exercise["answer"], f"no folded hint, or no solution: {exercise['statement']}"
    space = prepared(cells, "\n".join(source for e in exercises for source in (*e["code"], e["answer"])))
    for exercise in exercises:
        assert answered(exercise, space) == "right"
        for wrong in WRONG[lesson][exercise["name"][0]]:
            with pytest.raises(AssertionError, match=re.escape(wrong[-1])):
                answered(exercise, space, wrong)
        assert WRONG[lesson][exercise["name"][0]], "no wrong answer is tried"


def test_no_lesson_is_forgotten():
    lessons = {path.stem for path in NBS.glob("*.ipynb") if re.match(r"core$|\d\d[a-z]?_", path.stem)}
    assert lessons == set(WRONG)
