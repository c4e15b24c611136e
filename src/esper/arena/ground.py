from esper.arena.map_columns import columns as columns, read as read, unit_at as unit_at  # only for esper.arena.observe
