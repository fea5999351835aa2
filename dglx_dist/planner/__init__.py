"""Which strategy suits a graph, a model and a network: counted, measured, predicted, chosen."""
