"""sparsify"""
