"""Workers as AWS Lambda functions."""
