"""Train one problem by hand, with Evener, Lightning, Accelerate, HF Trainer and Ignite, each as its documentation says."""
