"""What a finished study writes: study.json, study.csv and study.html."""

import shlex
from typing import Any

from regard.files import write_text
from regard.runs.metrics import to_csv
from regard.study.folder import Plan, StudyFolder
from regard.study.page import study_page
from regard.study.plan import word_of
from regard.study.summary import Summary


def write_results(
    folder: StudyFolder, plan: Plan, summary: Summary, results: list[dict[str, Any]]
) -> None:
    """study.json with everything, study.csv with one row a run, study.html to look at."""
    folder.write_plan(plan, summary=summary.to_dict(), runs=results)
    write_text(folder.csv_file, csv_of(summary, results))
    write_text(folder.page_file, study_page(summary, results, command_of(plan)))


COLUMNS = (
    "optimizer", "form", "rate", "seed", "initial_loss", "final_loss", "accuracy", "held_out_loss",
    "diverged_at", "largest_logit", "lowest_entropy", "gradient_norm", "steps_to_target", "seconds",
)  # fmt: skip


def csv_of(summary: Summary, results: list[dict[str, Any]]) -> str:
    """One row a run; empty where a run diverged or never reached the accuracy."""
    rows = []
    for r in results:
        found = summary.forms[r["optimizer"]][r["form"]].cells[r["rate"]]
        seed = r["seed"]
        more = {
            "largest_logit": found.largest_logit[seed],
            "lowest_entropy": found.lowest_entropy[seed],
            "gradient_norm": found.gradient_norm[seed],
            "steps_to_target": found.steps_to[seed],
        }
        rows.append([{**r, **more}[column] for column in COLUMNS])
    return to_csv(COLUMNS, rows)


def command_of(plan: Plan) -> str:
    """The command that makes this study."""
    s, g = plan.settings, plan.grid
    options: dict[str, Any] = {
        "rates": ",".join(word_of(rate) for rate in g.rates),
        "forms": ",".join(g.forms),
        "seeds": g.seeds,
        "optimizer": ",".join(g.optimizers),
        "steps": s.steps,
        "batch-size": s.batch_size,
        "warmup": s.warmup,
        "weight-decay": s.weight_decay,
        "images": s.most_images,
    }
    height, width = s.model["image_size"]
    own = ["--like", s.like] if s.like is not None else [
        s.data, "--model", s.model["name"], "--image-size", str(height), str(width),
    ]  # fmt: skip
    words = ["regard", "study", *own, *(w for k, v in options.items() for w in (f"--{k}", str(v)))]
    return shlex.join(words)
