"""Weight transfer from the trainer's memory into engines, without files. The receivers are beside the engines."""
