"""Weight transfer from the trainer's memory into engines, without files. The code that receives the tensors is in the
package of each engine."""
