"""How many lines of code does a run go through: loading, two updates, saving?

    python benchmark/lines.py rloo.py --total_episodes 64 --num_eval_prompts 0
    trl1/bin/python benchmark/lines.py benchmark/trl_run.py rloo --total_episodes 64 --output_dir runs/lines

Counts, for each file of rloo.py, TRL, accelerate and the Trainer of transformers, the distinct lines in functions that
were executed. Models, tokenizers and torch do not count.
"""

import inspect
import runpy
import sys
from collections import defaultdict

PLACES = ("rloo.py", "/trl/", "/accelerate/", "/transformers/trainer", "/transformers/training_args")
executed = defaultdict(set)  # file -> numbers of lines


def trace(frame, event, value):
    code = frame.f_code
    in_function = code.co_flags & inspect.CO_OPTIMIZED  # neither a module nor a class
    if not in_function or not any(place in code.co_filename for place in PLACES):
        return None
    if event == "line":
        executed[code.co_filename].add(frame.f_lineno)
    return trace


if __name__ == "__main__":
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, script.rpartition("/")[0] or ".")
    sys.settrace(trace)
    runpy.run_path(script, run_name="__main__")
    sys.settrace(None)
    for file, numbers in sorted(executed.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):6}  {file}")
    print(f"{sum(map(len, executed.values())):6}  in {len(executed)} files")
