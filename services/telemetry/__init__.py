"""What a run tells about itself: spans and metrics, the live table, readable rollouts, plots.

Imported by module (`from services.telemetry.spans import Spans`), so that an actor which only times its stages loads
neither TensorBoard nor matplotlib.

The rule for names: a span's name is its metric's name, `role/stage`, and its value is seconds. The other metrics that
the table and the plots know are listed in `services.telemetry.table.COLUMNS` and `services.telemetry.plot.PANELS`.
"""
