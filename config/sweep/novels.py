# The four models on a small text, with ablations: timestep conditioning, no reverse scan, and no gradients through the
# prefix.
#     python -m tools.sweep config/sweep/novels.py
out_dir = "out/sweep_novels"
runs = ["config/small_attention.py", "config/small_attention.py learning_rate=3e-3",
        "config/small_diffumamba_h.py", "config/small_bdlm_attention.py",
        "config/small_mamba_h.py",
        "config/small_attention.py time_conditioning=true",
        "config/small_diffumamba_h.py time_conditioning=true",
        "config/small_bdlm_attention.py time_conditioning=true",
        "config/small_mamba_h.py time_conditioning=true",
        "config/small_mamba_h.py reverse_scan=false",
        "config/small_mamba_h.py detach_prefix=true"]
runs_per_gpu = 2
eval_settings = "mc=8"
