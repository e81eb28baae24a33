/* Minimum cuts of grids and graphs: accelerated projected gradient on the dual. See min_cut.py for the problem.

   Compiled once for float and once for double (-DREAL=...). Every function takes one problem; callers run problems in
   threads. Arrays are contiguous. The dual variable of an edge u - v is y in [lo, hi], hi the capacity of u -> v and -lo
   that of v -> u. Vertices have q = c - B'y. A set of vertices that edges with lo < y < hi connect is a region. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_CHECK 10 /* iterations before the gap is computed; the period grows by a quarter each time */

#define MAX_RATIO 32   /* of the gap to the tolerance, up to which the means over regions are tried */

typedef REAL real;

typedef struct {
    double gap;   /* relative to the value */
    double value; /* of the problem at q */
    int64_t iterations;
} result;

/* ------------------------------------------------------------------------------------------------------- regions */

static int32_t find(int32_t *parent, int32_t i) {
    while (parent[i] != i) {
        parent[i] = parent[parent[i]];
        i = parent[i];
    }
    return i;
}

static void join(int32_t *parent, int32_t i, int32_t j) {
    i = find(parent, i), j = find(parent, j);
    if (i < j) parent[j] = i;
    else parent[i] = j;
}

/* Replace parents by roots, and q by its mean over every region. */
static void average(int64_t n, int32_t *parent, const real *q, real *mean, double *sum, int32_t *count) {
    memset(sum, 0, n * sizeof *sum);
    memset(count, 0, n * sizeof *count);
    for (int64_t i = 0; i < n; i++) {
        int32_t root = find(parent, (int32_t)i);
        sum[root] += q[i], count[root]++;
    }
    for (int64_t i = 0; i < n; i++) parent[i] = find(parent, (int32_t)i);
    for (int64_t i = 0; i < n; i++) mean[i] = (real)(sum[parent[i]] / count[parent[i]]);
}

/* Momentum of Nesterov's method for the next step. */
static real momentum(double *t) {
    double next = (1 + sqrt(1 + 4 * *t * *t)) / 2;
    real beta = (real)((*t - 1) / next);
    *t = next;
    return beta;
}

/* Start again when a step points back: no momentum in this step. */
static void restart(double *t, real *z, const real *y, int64_t n) {
    memcpy(z, y, n * sizeof(real));
    *t = 1;
    momentum(t);
}

/* Whether the means over regions may reach the tolerance. */
static int is_near(double gap, double value, double tolerance, int last) {
    return last || !isfinite(value) || gap <= MAX_RATIO * tolerance * value;
}

static double relative(double gap, double value) {
    if (isnan(value) || isinf(value)) return fabs(value);
    return gap > 0 && value > 0 ? gap / value : 0;
}

/* Whether to stop: at the tolerance, at the last iteration, or at a NaN. Then the gap and the value become those of the
   better of q and its means over regions; with the right regions the means are exact long before q is. */
static int is_done(double *gap, double *value, double averaged_gap, double averaged, double tolerance, int last) {
    int done = isfinite(*value) && *gap <= tolerance * *value;
    done |= isfinite(averaged) && averaged_gap <= tolerance * averaged;
    if (!done && !last && !isnan(*value)) return 0;
    if (averaged <= *value) *gap = averaged_gap, *value = averaged;
    return 1;
}

/* --------------------------------------------------------------------------------------------------------- grids */

/* A grid of slabs x rows x columns. forward[a] and backward[a] are capacities along axis a (slabs, rows, columns), at the
   vertex that the edge leaves. y[a] is stored at the lower vertex; entries without an edge are zero. */
typedef struct {
    int64_t slabs, rows, columns;
    const real *source, *sink, *forward[3], *backward[3];
    real *y[3], *z[3], *q, *zero;
    real step;
} grid;

static int64_t slab_size(const grid *g) { return g->rows * g->columns; }

/* q = c - B'x in one slab. */
static void grid_vertices(const grid *g, real *const *x, int64_t slab) {
    int64_t S = slab_size(g), W = g->columns;
    for (int64_t i = 0; i < g->rows; i++) {
        int64_t o = slab * S + i * W;
        const real *restrict s = g->source + o, *restrict t = g->sink + o;
        const real *restrict a = x[0] + o, *restrict a_before = slab ? a - S : g->zero;
        const real *restrict b = x[1] + o, *restrict b_before = i ? b - W : g->zero;
        const real *restrict c = x[2] + o;
        real *restrict q = g->q + o;
        q[0] = s[0] - t[0] - (a[0] - a_before[0]) - (b[0] - b_before[0]) - c[0];
        for (int64_t j = 1; j < W; j++)
            q[j] = s[j] - t[j] - (a[j] - a_before[j]) - (b[j] - b_before[j]) - (c[j] - c[j - 1]);
    }
}

/* One projected step along n edges, whose upper vertices lie `stride` further. Returns (z - y_new)'(y_new - y). */
static real grid_step(const grid *g, int axis, int64_t o, int64_t n, int64_t stride, real beta) {
    const real *restrict q = g->q + o, *restrict r = g->q + o + stride;
    const real *restrict hi = g->forward[axis] + o, *restrict lo = g->backward[axis] + o + stride;
    real *restrict y = g->y[axis] + o, *restrict z = g->z[axis] + o;
    real back = 0, step = g->step;
    for (int64_t j = 0; j < n; j++) {
        real new = z[j] + step * (q[j] - r[j]);
        new = new > hi[j] ? hi[j] : new;
        new = new < -lo[j] ? -lo[j] : new;
        real change = new - y[j];
        back += (z[j] - new) * change;
        z[j] = new + beta * change;
        y[j] = new;
    }
    return back;
}

static double grid_iteration(const grid *g, real beta) {
    int64_t S = slab_size(g), W = g->columns;
    double back = 0;
    grid_vertices(g, g->z, 0);
    for (int64_t a = 0; a < g->slabs; a++) {
        if (a + 1 < g->slabs) {
            grid_vertices(g, g->z, a + 1); /* before this slab's step changes the edges between them */
            back += grid_step(g, 0, a * S, S, S, beta);
        }
        for (int64_t i = 0; i < g->rows; i++) {
            if (i + 1 < g->rows) back += grid_step(g, 1, a * S + i * W, W, W, beta);
            back += grid_step(g, 2, a * S + i * W, W - 1, 1, beta);
        }
    }
    return back;
}

/* Sum over edges of the total variation of q, and of the duality gap. */
static void grid_edges(const grid *g, const real *q, double *variation, double *gap) {
    int64_t S = slab_size(g), W = g->columns, N = g->slabs * S, strides[3] = {S, W, 1};
    *variation = *gap = 0;
    for (int axis = 0; axis < 3; axis++)
        for (int64_t o = 0; o < N; o += W) {
            int64_t slab = o / S, row = (o % S) / W;
            if ((axis == 0 && slab + 1 == g->slabs) || (axis == 1 && row + 1 == g->rows)) continue;
            int64_t n = axis == 2 ? W - 1 : W, stride = strides[axis];
            const real *hi = g->forward[axis] + o, *lo = g->backward[axis] + o + stride, *y = g->y[axis] + o;
            real sum = 0, rest = 0;
            for (int64_t j = 0; j < n; j++) {
                real d = q[o + j] - q[o + j + stride];
                real cost = d > 0 ? hi[j] * d : d < 0 ? -lo[j] * d : 0; /* a capacity may be infinite */
                sum += cost, rest += cost - y[j] * d;
            }
            *variation += sum, *gap += rest;
        }
}

static double grid_value(const grid *g, const real *q, double *gap) {
    double value;
    int64_t N = g->slabs * slab_size(g);
    grid_edges(g, q, &value, gap);
    for (int64_t i = 0; i < N; i++) {
        double d = (double)q[i] - ((double)g->source[i] - (double)g->sink[i]);
        value += d * d / 2;
    }
    return value;
}

/* The value of the dual, for infinite capacities. In general value - gap is more exact. */
static double grid_dual(const grid *g) {
    double value = 0;
    int64_t N = g->slabs * slab_size(g);
    for (int64_t i = 0; i < N; i++) {
        double c = (double)g->source[i] - (double)g->sink[i];
        value += (c - g->q[i]) * (c + g->q[i]) / 2;
    }
    return value;
}

static void grid_regions(const grid *g, int32_t *parent) {
    int64_t S = slab_size(g), W = g->columns, N = g->slabs * S, strides[3] = {S, W, 1};
    for (int64_t i = 0; i < N; i++) parent[i] = (int32_t)i;
    for (int axis = 0; axis < 3; axis++)
        for (int64_t o = 0; o < N; o += W) {
            if ((axis == 0 && o / S + 1 == g->slabs) || (axis == 1 && (o % S) / W + 1 == g->rows)) continue;
            int64_t n = axis == 2 ? W - 1 : W, stride = strides[axis];
            const real *hi = g->forward[axis] + o, *lo = g->backward[axis] + o + stride, *y = g->y[axis] + o;
            for (int64_t j = 0; j < n; j++)
                if (-lo[j] < y[j] && y[j] < hi[j]) join(parent, (int32_t)(o + j), (int32_t)(o + j + stride));
        }
}

/* Solve one problem. channels: (2 axes + 2) x N capacities: [later, earlier,] right, left, down, up, source, sink.
   y: axes x N, an initial value and the solution. q: N. regions: N, the root of each vertex. Returns 0 without memory. */
static int solve_grid(const real *channels, int64_t frames, int64_t height, int64_t width, double tolerance,
               int64_t max_iterations, real *y, real *q, int32_t *regions, result *out) {
    int axes = frames ? 3 : 2, time = frames ? 2 : 0;
    int64_t N = (frames ? frames : 1) * height * width;
    grid g = {.slabs = frames ? frames : height, .rows = frames ? height : 1, .columns = width};
    const real *right = channels + time * N, *down = right + 2 * N;
    g.source = channels + (2 * axes) * N, g.sink = g.source + N;
    g.forward[0] = frames ? channels : down, g.backward[0] = g.forward[0] + N;
    g.forward[1] = down, g.backward[1] = down + N;
    g.forward[2] = right, g.backward[2] = right + N;
    real *memory = calloc((2 + axes) * N + width, sizeof(real)); /* z, unused, means, zeros */
    double *sum = malloc(N * sizeof *sum);
    int32_t *count = malloc(N * sizeof *count);
    if (!memory || !sum || !count) {
        free(memory), free(sum), free(count);
        return 0;
    }
    g.q = q, g.zero = memory + (2 + axes) * N;
    real *unused = memory + axes * N, *mean = memory + (axes + 1) * N; /* the rows of an image are its slabs */
    g.y[0] = frames ? y : y + N, g.y[1] = frames ? y + 2 * N : unused, g.y[2] = frames ? y + N : y;
    g.z[0] = frames ? memory : memory + N, g.z[1] = frames ? memory + 2 * N : unused, g.z[2] = frames ? memory + N : memory;
    g.step = (real)(1.0 / (4 * axes));
    memcpy(memory, y, axes * N * sizeof(real));

    double t = 1, gap = 0, value = 0;
    int64_t k = 0, checked = FIRST_CHECK, period = FIRST_CHECK;
    for (;; k++) {
        if (k == checked || k >= max_iterations) {
            for (int64_t a = 0; a < g.slabs; a++) grid_vertices(&g, g.y, a);
            value = grid_value(&g, q, &gap);
            checked = k + period, period += period / 4;
            if (is_near(gap, value, tolerance, k >= max_iterations)) {
                double rest, averaged, better;
                grid_regions(&g, regions);
                average(N, regions, q, mean, sum, count);
                averaged = grid_value(&g, mean, &rest);
                better = averaged - (isfinite(value) ? value - gap : grid_dual(&g));
                if (is_done(&gap, &value, better, averaged, tolerance, k >= max_iterations)) {
                    if (value == averaged) memcpy(q, mean, N * sizeof(real));
                    break;
                }
            }
        }
        if (grid_iteration(&g, momentum(&t)) > 0) restart(&t, memory, y, axes * N);
    }
    out->gap = relative(gap, value), out->value = value, out->iterations = k;
    free(memory), free(sum), free(count);
    return 1;
}

/* -------------------------------------------------------------------------------------------------------- graphs */

/* Solve one problem: edges of M pairs u - v, N vertices with c = source - sink. y: M. q: N. step: M. */
static int solve_graph(const int32_t *u, const int32_t *v, int64_t M, int64_t N, const real *hi, const real *lo, const real *c,
                const real *step, double tolerance, int64_t max_iterations, real *y, real *q, int32_t *regions,
                result *out) {
    real *z = malloc((M + N) * sizeof(real) + 1), *mean = z ? z + M : NULL;
    double *sum = malloc(N * sizeof *sum + 1);
    int32_t *count = malloc(N * sizeof *count + 1);
    if (!z || !sum || !count) {
        free(z), free(sum), free(count);
        return 0;
    }
    memcpy(z, y, M * sizeof(real));
    double t = 1, gap = 0, value = 0;
    int64_t k = 0, checked = FIRST_CHECK, period = FIRST_CHECK;
    for (;; k++) {
        if (k == checked || k >= max_iterations) {
            double averaged = 0, dual = 0, better;
            value = gap = 0;
            memcpy(q, c, N * sizeof(real));
            for (int64_t e = 0; e < M; e++) q[u[e]] -= y[e], q[v[e]] += y[e];
            for (int64_t i = 0; i < N; i++) regions[i] = (int32_t)i;
            for (int64_t e = 0; e < M; e++)
                if (lo[e] < y[e] && y[e] < hi[e]) join(regions, u[e], v[e]);
            average(N, regions, q, mean, sum, count);
            for (int64_t i = 0; i < N; i++) {
                double d = (double)q[i] - c[i], m = (double)mean[i] - c[i];
                value += d * d / 2, averaged += m * m / 2, dual += (c[i] - q[i]) * ((double)c[i] + q[i]) / 2;
            }
            for (int64_t e = 0; e < M; e++) {
                double d = (double)q[u[e]] - q[v[e]], m = (double)mean[u[e]] - mean[v[e]];
                double cost = d > 0 ? hi[e] * d : d < 0 ? lo[e] * d : 0; /* a capacity may be infinite */
                value += cost, gap += cost - y[e] * d, averaged += m > 0 ? hi[e] * m : m < 0 ? lo[e] * m : 0;
            }
            better = averaged - (isfinite(value) ? value - gap : dual);
            checked = k + period, period += period / 4;
            if (is_near(gap, value, tolerance, k >= max_iterations) &&
                is_done(&gap, &value, better, averaged, tolerance, k >= max_iterations)) {
                if (value == averaged) memcpy(q, mean, N * sizeof(real));
                break;
            }
        }
        double back = 0;
        real beta = momentum(&t);
        memcpy(q, c, N * sizeof(real));
        for (int64_t e = 0; e < M; e++) q[u[e]] -= z[e], q[v[e]] += z[e];
        for (int64_t e = 0; e < M; e++) {
            real new = z[e] + step[e] * (q[u[e]] - q[v[e]]);
            new = new > hi[e] ? hi[e] : new < lo[e] ? lo[e] : new;
            real change = new - y[e];
            back += (double)(z[e] - new) * change / step[e];
            z[e] = new + beta * change;
            y[e] = new;
        }
        if (back > 0) restart(&t, z, y, M);
    }
    out->gap = relative(gap, value), out->value = value, out->iterations = k;
    free(z), free(sum), free(count);
    return 1;
}

/* ------------------------------------------------------------------------------------------------------- batches */

/* Solve problems until none is left. Threads share `next`. Returns 0 without memory. */
int solve_grids(const real *channels, int64_t batch, int64_t frames, int64_t height, int64_t width, double tolerance,
                int64_t max_iterations, real *y, real *q, int32_t *regions, result *out, int64_t *next) {
    int64_t axes = frames ? 3 : 2, N = (frames ? frames : 1) * height * width, b;
    while ((b = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < batch)
        if (!solve_grid(channels + b * (2 * axes + 2) * N, frames, height, width, tolerance, max_iterations,
                        y + b * axes * N, q + b * N, regions + b * N, out + b))
            return 0;
    return 1;
}

int solve_graphs(const int32_t *u, const int32_t *v, int64_t M, int64_t N, int64_t batch, const real *hi, const real *lo,
                 const real *c, const real *step, double tolerance, int64_t max_iterations, real *y, real *q,
                 int32_t *regions, result *out, int64_t *next) {
    int64_t b;
    while ((b = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < batch)
        if (!solve_graph(u, v, M, N, hi + b * M, lo + b * M, c + b * N, step, tolerance, max_iterations, y + b * M,
                         q + b * N, regions + b * N, out + b))
            return 0;
    return 1;
}
