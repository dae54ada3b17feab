"""Search settings for the best score and prove the winner: space, ask and tell, duel, ablation."""
