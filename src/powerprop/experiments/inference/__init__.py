"""Which task is an input of? Every method on several streams, and inputs of no task."""
