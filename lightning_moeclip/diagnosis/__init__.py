"""What users ask the package about itself: who reduces what, is it right, is this machine fit for it."""
