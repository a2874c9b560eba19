"""
Evaluates a checkpoint with the tasks and metrics of lm-evaluation-harness (EleutherAI). eval.py scores the answers and
sample.generate generates text, so results differ from those of eval.py only where the protocols differ.

    pip install lm_eval==0.4.13
    python -m tools.harness --checkpoint=out/mamba_h_87m --tasks=piqa,arc_easy --limit=200
    python -m tools.harness --tasks=mine --include_path=folder      # your own task files, local data

Differences in protocol: acc_norm divides by the characters of an answer, eval.py's acc_per_token by its tokens. If two
answers score the same, the harness takes the first, and eval.py splits the credit. For perplexity use eval.py: the
harness asks for a likelihood, and a diffusion model has only a bound (the NELBO). "Greedy" is always false.
"""
import collections
import itertools
import json
import sys

import torch

import eval as evaluation
import sample
from configurator import UserError, check, configure, script, tqdm
from data import encode_choices, noise_seeds
from decoders import Sampler, usual_tokens_per_step
from files import check_file, write_file
from model import cast_for_inference
from parallel import Parallel, pick_dtype, select_kernels

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    sys.exit(f"harness.py: {error}; pip install lm_eval==0.4.13")

# ----------------------------------------------------------------------------------------------
# Settings
checkpoint = "out/ckpt.pt"              # a file of train.py, a folder or hf://owner/name
tasks = []                              # names of harness tasks, such as piqa,arc_easy
include_path = ""                       # a folder with task files of your own
limit = 0                               # questions per task, the first ones; 0: all
score = "pll"                           # how eval.py scores an answer: pll or nelbo
mc = 8                                  # noise samples per answer, for score=nelbo; at least 8
tokens_per_step = 0                     # revealed per denoising step; 0: as in sample.py
batch_size = 8                          # a batch of questions has about batch_size * seq_len tokens
seed = 1337                             # of all noise
out = ""                                # write results and answers to this JSON file
device = "auto"                         # auto, cpu or cuda
dtype = "auto"                          # auto: bfloat16 where the GPU has it, float32 elsewhere


@register_model("nanobdlm")
class NanoBDLM(LM):
    """A trained model with the interface that the harness calls."""

    def __init__(self, path):
        super().__init__()
        self.parallel = Parallel(device)
        dev = self.parallel.device
        self.kernels = select_kernels("auto", dev)
        trained, self.text, self.about = evaluation.open_checkpoint(path, dev)
        # The engine comes first: the simple engine casts the weights in place.
        self.engine = sample.open_engine("auto", trained, pick_dtype(dtype, dev))
        self.model = cast_for_inference(trained, pick_dtype(dtype, dev))

    def loglikelihood(self, requests):
        """[(log p of the continuation in nats, False)], one for each request. The requests of one question are
        consecutive. They get the same noise, and if the context is too long, it is cut at the same place for all."""
        return [answer for _, task in itertools.groupby(requests, lambda r: r.task_name)
                for answer in self.answers(list(task))]

    def answers(self, requests):
        """`loglikelihood` of one task: as in eval.py, the noise depends on the question's number in its task."""
        groups = [list(group) for _, group in itertools.groupby(requests, lambda r: r.doc_id)]
        s = self.model.config.seq_len
        try:
            questions = [encode_choices(self.text, *zip(*(r.args for r in group)), s)[0] for group in groups]
        except ValueError as error:
            raise UserError(f"task {requests[0].task_name}: {error}") from None
        cost = evaluation.score_answers(self.model, questions, self.parallel, score, seed, mc, batch_size * s)
        return [(-float(cost[q, c]), False) for q, group in enumerate(groups) for c in range(len(group))]

    def loglikelihood_rolling(self, requests):
        raise UserError("a task asks for the likelihood of whole texts; python eval.py has the NELBO, a bound on it")

    def generate_until(self, requests):
        """The text that continues each context, up to the first of its `until` strings. As in sample.py, a block model
        may exceed the length of its training. A context that is too long loses its beginning. A request's noise
        depends on its number in its task."""
        made, (model, new_engine), config, seen = [], self.engine, self.model.config, collections.Counter()
        most = config.seq_len if config.full_sequence else config.rope_capacity // config.block_len * config.block_len
        for request in tqdm(requests, "generation", disable=None):
            context, how = request.args[0], normalize_gen_kwargs(request.args[1])
            length, task = how["max_gen_toks"], request.task_name
            if unknown := how.keys() - {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}:
                raise UserError(f"task {task} sets {min(unknown)}, which is no setting here; remove it from the task")
            if not 0 < length < most:
                raise UserError(f"task {task} asks for {length} new tokens, but prompt and answer together can have "
                                f"{most}; set max_gen_toks of the task")
            prompt = self.text.encode_ordinary(context)[length - most:] or [self.text.eot_token]
            sampler = Sampler(noise_seeds(seed, [seen[task]]), mask_id=config.mask_id,
                              tokens_per_step=tokens_per_step or usual_tokens_per_step(config, length),
                              temperature=how.get("temperature", 1.0) if how["do_sample"] else 0.0,
                              top_k=how.get("top_k", 0), top_p=how.get("top_p", 1.0))
            seen[task] += 1
            done = sample.generate(model, [torch.tensor(prompt)], length, sampler, new_engine,
                                   stop_token=self.text.eot_token)
            new = done.tokens[0][len(prompt):]
            text = self.text.decode(new[new != self.text.eot_token].tolist())
            for stop in filter(None, how["until"]):
                text = text.partition(stop)[0]
            made.append(text)
        return made


def main():
    check(globals(), least=dict(limit=0, mc=8, tokens_per_step=0, batch_size=1, seed=0),
          choices=dict(score=("pll", "nelbo"), dtype=("auto", "float32", "bfloat16")))
    check_file("out", out)
    if not tasks:
        raise UserError("there are no tasks; name some of the harness, as in --tasks=piqa,arc_easy")
    manager = TaskManager(include_path=include_path or None)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise UserError(f"the harness has no task '{unknown[0]}'; python -m lm_eval ls tasks lists them")
    model = NanoBDLM(checkpoint)
    print(f"{model.about['model']}, {model.about['parameters']:,} parameters | {model.kernels}", flush=True)
    results = simple_evaluate(model, tasks=tasks, task_manager=manager, limit=limit or None, bootstrap_iters=1000)
    print(make_table(results))
    answers = {task: [dict(question=row["doc_id"], gold=row["target"], acc=row.get("acc"),
                           log_p=[float(r[0]) for r in row["filtered_resps"]] if row.get("acc") is not None else None,
                           text=row["filtered_resps"] if row.get("acc") is None else None)
                      for row in rows] for task, rows in results["samples"].items()}
    write_file(out, json.dumps(dict(checkpoint=model.about, results=results["results"], answers=answers), default=str))


if __name__ == "__main__":
    with script("harness.py"):
        configure(globals())
        main()
