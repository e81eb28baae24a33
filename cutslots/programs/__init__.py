"""Optimisation problems as differentiable layers.

Every layer solves a quadratic program (QP). Those with equality constraints are linear maps, solved exactly and
differentiable to any order. `MinCut` keeps the inequalities and iterates up to a duality gap. The package needs torch,
numpy and scipy and imports nothing else of cutslots. Sparse factorisations (`EqualityQP` with a sparse A, `GraphCut`)
also need cholespy. Read the modules in this order:

    constants        tensors that a layer computes again when it moves, and does not save
    linear_solvers   factors, conjugate gradients, and the custom ops that compiled and exported code calls
    qp               the general QP layer, and `linear_map`, which tells autograd that a solve is a linear map
    graph            graphs with a source and a sink; the min-cut QP and the matching QP as explicit sparse matrices
    fill             an estimate of how many entries a sparse factor would have
    graph_cut        the min-cut QP on any graph, reduced to its vertices: a factor, an inverse or conjugate gradients
    dct              filters in the basis of the cosine transform, by matrix products or by FFT
    grid_cut         the min-cut QP on images and clips, as one such filter
    grid_cut_triton  CUDA kernels for grid_cut
    native           C code for the CPU, compiled on first use
    min_cut_solver   the minimum cut with its inequalities: projected gradients, the duality gap, regions
    min_cut_triton   CUDA kernels for min_cut_solver
    min_cut_grids    minimum cuts of grids: selects the backend; large images coarse to fine
    min_cut          the minimum cut of images, clips and graphs as a layer with gradients for every capacity
    matching         the bipartite matching QP in closed form, and the matching of slots
    exact            the unrelaxed problems: minimum cut by maximum flow, minimum-cost matching by linear assignment

Shapes: B batch, K slots, H W grid, T frames, N vertices without the terminals, E edges; `...` is any batch.
"""
