"""Pipeline parallelism: each rank runs some of the layers.

Read in this order: ``schedules`` (what each rank does, in which order), ``stages`` (how a model
is cut, and how one stage of it runs), ``executor`` (runs a rank's list of actions), ``p2p`` (sends
and receives). ``pipeline`` has the strategies, and cuts the model. ``weight_gradients`` is for
zero bubble alone. ``schedule_analysis`` says what a schedule costs, and runs nothing.
"""
