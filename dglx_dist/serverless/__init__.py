"""Serverless execution: tasks, stages, controller, workers, executors and parameter servers."""
