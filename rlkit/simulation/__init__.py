"""A run without a machine: the published experiments, and any recipe, from one set of constants.

simulate.py  a set-up in, a run out; how test beds are made      recipes.py   a recipe as a set-up
setup.py     what a set-up is                                    hardware.py  GPUs and models by their data sheets
constants.py every number with its unit and origin               lengths.py   prompts and completions
events.py    the clock: one heap                                 window.py    values to metrics, as TRL reduces them
replica.py   one engine, fluid between events                    prompt_cache.py  which prompts it holds
fleet.py     engines behind the router                           rollout.py   rollouts, groups, samples
worker.py    TRL's rollout worker with the admission gate        batches.py   samples to rows
trainer.py   TRL's trainer                                       sync.py      weight syncs, by the proxy's registry
frame.py     a run as trackio and a frame have it           published.py  all published figures, simulated
cells.py     how each figure is measured, and judged        published.json  the figures themselves
prediction.py  a recipe's time, cost and verdict            planning.py  the best ways to run a recipe
calibration.py  constants from a user's own runs    published_fit.py  and from the published figures
fitting.py   least squares for simulations          cores.py  cores that trainer and engines share
"""
