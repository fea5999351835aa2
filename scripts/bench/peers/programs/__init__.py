"""Programs of the measured systems, run by path in processes of their own and never imported.

Only here may ``dgl.distributed`` be imported.
"""
