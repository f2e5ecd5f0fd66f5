"""rlkit: why is this asynchronous GRPO run slow, what to change, and what that will cost.

The way of the data, one module a step:

    rlkit.recipe      a run as data                     rlkit.preflight   what would go wrong, before it starts
    rlkit.engines     where its jobs execute            rlkit.training    what runs in the trainer job
    rlkit.serving     between trainer and replicas      rlkit.tracking    trackio in, one frame per run out
    rlkit.diagnosis   frame in, verdict out             rlkit.figures     frames in, plotly out
    rlkit.advice      what to change after a run        rlkit.chase       doing so until nothing pays
    rlkit.sizing      what size a setting should have   rlkit.price       what an hour and a run cost
    rlkit.report      notebook in, one HTML file out    rlkit.cli         the command line
    rlkit.simulation  a recipe in, its run out, without a machine
    rlkit.run_name    what a command line calls a run   rlkit.results     what a run leaves once it is over

What people look at while a run goes on, each pure with a thin shell of widgets:

    rlkit.live        rows in, panels out               rlkit.live_view    them as widgets, with stop and a limit
    rlkit.sketch      a figure as a small SVG           rlkit.live_source  a run's folder, or a trackio project
    rlkit.launch_plan a form's fields in, a plan out    rlkit.launch_form  it as widgets, and the start
    rlkit.live_figures two figures of its own           rlkit.previous_run what changed since the run before
    rlkit.report_data what a report says, for machines  rlkit.step_rows   a run's steps.jsonl as a frame
    rlkit.scoreboard  several runs in, one row a run out (scoreboard_text: tables to read)
    rlkit.overlay     what a figure of several runs shows, chase_figures draws it, run_looks tells runs apart
    rlkit.five_runs   the published chase run again, walk shows it run by run
    rlkit.sweep       a grid as data: its points, and which to start next
    rlkit.sweep_run   each point a notebook's run: sweep_kernels and sweep_nursery start them, sweep_point is inside
    rlkit.sweep_folder    what a sweep leaves on disk; sweep_current tells whether its pages are those of its points
    rlkit.sweep_table one row a point; sweep_figures compares them, sweep_view reads a sweep back
    rlkit.what_if     a recipe with other settings, predicted; what_if_view has the sliders
    rlkit.routing_story   where rollouts went and why; routing_figures draws it
"""

__version__ = "0.1.0"
