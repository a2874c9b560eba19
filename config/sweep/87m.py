# The paper's grid (tab:validation-87m-full): four models, five learning rates, 5.000B tokens each.
#     python data.py dclm --tokens 5e9 --out data/dclm; python data.py c4
#     python -m tools.sweep config/sweep/87m.py
# 100B tokens in all: about three days on one H200, or ten hours on eight, with one run on each.
out_dir = "out/sweep_87m"
runs = [f"config/{model}_87m.py learning_rate={rate}" for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
        for model in ("attention", "diffumamba_h", "bdlm_attention", "mamba_h")]
eval_settings = "data=data/c4 mc=1 sequences=256"   # the paper's text and its one noise sample; 256 is ours
