/* Minimum cuts of grids and graphs: accelerated projected gradient on the dual. See min_cut.py for the problem.

   Compiled once for float and once for double (-DREAL=...). Callers run problems in threads; a large grid is one problem
   for a team of threads. Arrays are contiguous. The dual variable of an edge u - v is y in [lo, hi], hi the capacity of u -> v and -lo
   that of v -> u. Vertices have q = c - B'y. A set of vertices that edges with lo < y < hi connect is a region. */

#include <math.h>
#include <pthread.h>
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

/* A grid of slabs x rows x columns; the rows of an image are slabs of one row. Along axis a (slabs, rows, columns) an edge
   is stored at its lower vertex: y[a] with -low[a] <= y[a] <= high[a]. Entries without an edge are zero in y. */
typedef struct {
    int64_t slabs, rows, columns;
    const real *source, *sink, *high[3], *low[3];
    real *c, *y[3], *z[3], *q, *zero;
    real step;
} grid;

static int64_t slab_size(const grid *g) { return g->rows * g->columns; }

/* q = c - B'x in one slab. */
static void grid_vertices(const grid *g, real *const *x, int64_t slab) {
    int64_t S = slab_size(g), W = g->columns;
    for (int64_t i = 0; i < g->rows; i++) {
        int64_t o = slab * S + i * W;
        const real *restrict c = g->c + o, *restrict along = x[2] + o;
        const real *restrict a = x[0] + o, *restrict a_before = slab ? a - S : g->zero;
        real *restrict q = g->q + o;
        q[0] = c[0] - (a[0] - a_before[0]) - along[0];
        for (int64_t j = 1; j < W; j++) q[j] = c[j] - (a[j] - a_before[j]) - (along[j] - along[j - 1]);
        if (g->rows == 1) continue;
        const real *restrict b = x[1] + o, *restrict b_before = i ? b - W : g->zero;
        for (int64_t j = 0; j < W; j++) q[j] -= b[j] - b_before[j];
    }
}

/* One projected step along n edges, whose upper vertices lie `stride` further. Returns (z - y_new)'(y_new - y). */
static real grid_step(const grid *g, int axis, int64_t o, int64_t n, int64_t stride, real beta) {
    const real *restrict q = g->q + o, *restrict r = g->q + o + stride;
    const real *high = g->high[axis] + o, *low = g->low[axis] + o; /* may be the same */
    real *restrict y = g->y[axis] + o, *restrict z = g->z[axis] + o;
    real back = 0, step = g->step;
    for (int64_t j = 0; j < n; j++) {
        real new = z[j] + step * (q[j] - r[j]);
        new = new > high[j] ? high[j] : new;
        new = new < -low[j] ? -low[j] : new;
        real change = new - y[j];
        back += (z[j] - new) * change;
        z[j] = new + beta * change;
        y[j] = new;
    }
    return back;
}

/* The steps of slabs from `first` to `last`, excluded. q of the first and of the last one is there already. */
static void grid_iteration(const grid *g, int64_t first, int64_t last, real beta, double *back) {
    int64_t S = slab_size(g), W = g->columns;
    for (int64_t a = first; a < last; a++) {
        back[a] = 0;
        if (a + 1 < last) grid_vertices(g, g->z, a + 1); /* before this slab's step changes the edges between them */
        if (a + 1 < g->slabs) back[a] += grid_step(g, 0, a * S, S, S, beta);
        for (int64_t i = 0; i < g->rows; i++) {
            if (i + 1 < g->rows) back[a] += grid_step(g, 1, a * S + i * W, W, W, beta);
            back[a] += grid_step(g, 2, a * S + i * W, W - 1, 1, beta);
        }
    }
}

/* Visit the edges of one slab as runs: offset o, number n and stride. */
#define FOR_RUNS(g, slab, axis, o, n, stride)                                                                         \
    for (int axis = 0; axis < 3; axis++)                                                                              \
        for (int64_t row_ = 0, S_ = slab_size(g), W_ = (g)->columns,                                                  \
                     rows_ = axis == 0 ? ((slab) + 1 < (g)->slabs ? (g)->rows : 0) : (g)->rows - (axis == 1);         \
             row_ < rows_; row_++)                                                                                    \
            for (int64_t o = (slab) * S_ + row_ * W_, n = W_ - (axis == 2),                                           \
                         stride = axis == 0 ? S_ : axis == 1 ? W_ : 1, once_ = 1; once_; once_ = 0)

/* The value of the problem at q, and the duality gap, in one slab. */
static void grid_value(const grid *g, const real *q, int64_t slab, double *value, double *gap) {
    int64_t S = slab_size(g);
    double variation = 0, rests = 0, squares = 0;
    FOR_RUNS(g, slab, axis, o, n, stride) {
        const real *high = g->high[axis] + o, *low = g->low[axis] + o, *y = g->y[axis] + o;
        real sum = 0, rest = 0;
        for (int64_t j = 0; j < n; j++) {
            real d = q[o + j] - q[o + j + stride];
            real cost = d > 0 ? high[j] * d : d < 0 ? -low[j] * d : 0; /* a capacity may be infinite */
            sum += cost, rest += cost - y[j] * d;
        }
        variation += sum, rests += rest;
    }
    for (int64_t i = slab * S; i < (slab + 1) * S; i++) {
        double d = (double)q[i] - ((double)g->source[i] - (double)g->sink[i]);
        squares += d * d / 2;
    }
    *value = variation + squares, *gap = rests;
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

/* Connect the vertices of a slab, or those of the slab and the next one. */
static void grid_regions(const grid *g, int64_t slab, int with_next, int32_t *parent) {
    FOR_RUNS(g, slab, axis, o, n, stride) {
        if ((axis == 0) != with_next) continue;
        const real *high = g->high[axis] + o, *low = g->low[axis] + o, *y = g->y[axis] + o;
        for (int64_t j = 0; j < n; j++)
            if (-low[j] < y[j] && y[j] < high[j]) join(parent, (int32_t)(o + j), (int32_t)(o + j + stride));
    }
}

/* ---------------------------------------------------------------------------------------------------- grids: teams */

/* Threads that wait for each other. */
typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t all_here;
    int members, waiting;
    int64_t meetings;
} team;

static void meet(team *t) {
    if (t->members == 1) return;
    pthread_mutex_lock(&t->mutex);
    int64_t meeting = t->meetings;
    if (++t->waiting == t->members) {
        t->waiting = 0, t->meetings++;
        pthread_cond_broadcast(&t->all_here);
    } else
        while (meeting == t->meetings) pthread_cond_wait(&t->all_here, &t->mutex);
    pthread_mutex_unlock(&t->mutex);
}

/* One problem and its team. Sums are stored for each slab and added in their order, so that a team of any size computes
   the same. */
typedef struct {
    grid g;
    team team;
    int axes;
    int64_t vertices, max_iterations;
    double tolerance, *back, *values, *gaps, *sum;
    real *y, *z, *mean;
    int32_t *regions, *count;
    result *out;
} task;

typedef struct {
    task *task;
    int number;
    pthread_t thread;
} member;

static double total(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum;
}

/* The value at q and its gap, the same in all threads. */
static double shared_value(task *s, const real *q, int64_t first, int64_t last, double *gap) {
    meet(&s->team); /* q is complete, and nobody reads the last sums */
    for (int64_t a = first; a < last; a++) grid_value(&s->g, q, a, s->values + a, s->gaps + a);
    meet(&s->team);
    *gap = total(s->gaps, s->g.slabs);
    return total(s->values, s->g.slabs);
}

/* Write the regions, and the means of q over them. */
static void shared_means(task *s, int64_t first, int64_t last, int is_first) {
    int64_t S = slab_size(&s->g);
    for (int64_t i = first * S; i < last * S; i++) s->regions[i] = (int32_t)i;
    for (int64_t a = first; a < last; a++) {
        grid_regions(&s->g, a, 0, s->regions);
        if (a + 1 < last) grid_regions(&s->g, a, 1, s->regions);
    }
    meet(&s->team);
    if (!is_first) return; /* shared_value waits for the means */
    for (int i = 1; i < s->team.members; i++) /* between the parts of two threads */
        grid_regions(&s->g, s->g.slabs * i / s->team.members - 1, 1, s->regions);
    average(s->vertices, s->regions, s->g.q, s->mean, s->sum, s->count);
}

/* Whether to stop after k iterations. Then the result and q are there. */
static int shared_check(task *s, int64_t k, int64_t first, int64_t last, int is_first) {
    double gap, rest, value, averaged, better;
    int is_last = k >= s->max_iterations;
    for (int64_t a = first; a < last; a++) grid_vertices(&s->g, s->g.y, a);
    value = shared_value(s, s->g.q, first, last, &gap);
    if (!is_near(gap, value, s->tolerance, is_last)) return 0;
    shared_means(s, first, last, is_first);
    averaged = shared_value(s, s->mean, first, last, &rest);
    better = averaged - (isfinite(value) ? value - gap : grid_dual(&s->g));
    meet(&s->team); /* nobody needs q any more */
    if (!is_done(&gap, &value, better, averaged, s->tolerance, is_last)) return 0;
    if (!is_first) return 1;
    if (value == averaged) memcpy(s->g.q, s->mean, s->vertices * sizeof(real));
    *s->out = (result){relative(gap, value), value, k};
    return 1;
}

/* The iterations of one thread, on its part of the slabs. */
static void *run(void *argument) {
    member *self = argument;
    task *s = self->task;
    pthread_mutex_lock(&s->team.mutex); /* until the team is complete */
    pthread_mutex_unlock(&s->team.mutex);
    int members = s->team.members, is_first = self->number == 0;
    int64_t first = s->g.slabs * self->number / members, last = s->g.slabs * (self->number + 1) / members;
    int64_t S = slab_size(&s->g), checked = FIRST_CHECK, period = FIRST_CHECK;
    double t = 1;
    for (int64_t k = 0;; k++) {
        if (k == checked || k >= s->max_iterations) {
            if (shared_check(s, k, first, last, is_first)) return NULL;
            checked = k + period, period += period / 4;
        }
        grid_vertices(&s->g, s->g.z, first);
        meet(&s->team); /* the q that others need is there, and nobody reads the last sums */
        grid_iteration(&s->g, first, last, momentum(&t), s->back);
        meet(&s->team);
        if (!(total(s->back, s->g.slabs) > 0)) continue;
        for (int i = 0; i < s->axes; i++) /* a step points back: no momentum in this step */
            memcpy(s->z + i * s->vertices + first * S, s->y + i * s->vertices + first * S, (last - first) * S * sizeof(real));
        t = 1, momentum(&t);
        meet(&s->team); /* z is complete */
    }
}

static void run_team(task *s, int members) {
    member *all = calloc(members, sizeof *all);
    member alone = {s, 0};
    s->team = (team){PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 1};
    pthread_mutex_lock(&s->team.mutex);
    for (; all && s->team.members < members; s->team.members++) {
        member *next = all + s->team.members;
        *next = (member){s, s->team.members};
        if (pthread_create(&next->thread, NULL, run, next)) break; /* the team is smaller then */
    }
    pthread_mutex_unlock(&s->team.mutex);
    run(&alone);
    for (int i = 1; i < s->team.members; i++) pthread_join(all[i].thread, NULL);
    free(all);
}

/* ------------------------------------------------------------------------------------------------- grids: problems */

/* The capacities from upper to lower vertices, stored at the lower ones. If both directions have the same, one array is
   read instead of two. Runs of `run` vertices end without an edge; 0 if none does. */
static const real *low_capacities(const real *forward, const real *backward, int64_t n, int64_t stride, int64_t run) {
    for (int64_t i = 0; i + stride < n; i++)
        if (forward[i] != backward[i + stride] && !(run && (i + 1) % run == 0)) return backward + stride;
    return forward;
}

/* Solve one problem. channels: (2 axes + 2) x N capacities: [later, earlier,] right, left, down, up, source, sink.
   y: axes x N, an initial value and the solution. q: N. regions: N, the root of each vertex. Returns 0 without memory. */
static int solve_grid(const real *channels, int64_t frames, int64_t height, int64_t width, double tolerance,
                      int64_t max_iterations, int members, real *y, real *q, int32_t *regions, result *out) {
    int axes = frames ? 3 : 2, time = frames ? 2 : 0;
    int64_t N = (frames ? frames : 1) * height * width, S = frames ? height * width : width;
    grid g = {.slabs = frames ? frames : height, .rows = frames ? height : 1, .columns = width};
    const real *right = channels + time * N, *down = right + 2 * N, *slabs = frames ? channels : down;
    g.source = channels + (2 * axes) * N, g.sink = g.source + N;
    real *memory = calloc((2 + axes) * N + width, sizeof(real)); /* z, c, means, zeros */
    double *sum = malloc((N + 3 * g.slabs) * sizeof *sum);
    int32_t *count = malloc(N * sizeof *count);
    if (!memory || !sum || !count) {
        free(memory), free(sum), free(count);
        return 0;
    }
    g.high[0] = slabs, g.low[0] = low_capacities(slabs, slabs + N, N, S, 0);
    g.high[2] = right, g.low[2] = low_capacities(right, right + N, N, 1, width);
    if (frames) g.high[1] = down, g.low[1] = down + N + width;
    real *z = memory;
    int order[3] = {frames ? 0 : 1, 2, frames ? 1 : 0}; /* of the axes in y and z: [time,] columns, rows */
    for (int axis = 0; axis < 3; axis++) {
        if (axis == 1 && !frames) continue;
        g.y[axis] = y + order[axis] * N, g.z[axis] = z + order[axis] * N;
    }
    g.q = q, g.c = memory + axes * N, g.zero = memory + (2 + axes) * N, g.step = (real)(1.0 / (4 * axes));
    for (int64_t i = 0; i < N; i++) g.c[i] = g.source[i] - g.sink[i];
    memcpy(z, y, axes * N * sizeof(real));
    task s = {.g = g, .axes = axes, .vertices = N, .max_iterations = max_iterations, .tolerance = tolerance, .out = out};
    s.y = y, s.z = z, s.mean = memory + (axes + 1) * N, s.regions = regions, s.count = count, s.sum = sum;
    s.back = sum + N, s.values = s.back + g.slabs, s.gaps = s.values + g.slabs;
    run_team(&s, members < g.slabs ? members : (int)g.slabs);
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

/* Solve problems until none is left, each with a team of `members`. Threads share `next`. Returns 0 without memory. */
int solve_grids(const real *channels, int64_t batch, int64_t frames, int64_t height, int64_t width, int64_t members,
                double tolerance, int64_t max_iterations, real *y, real *q, int32_t *regions, result *out, int64_t *next) {
    int64_t axes = frames ? 3 : 2, N = (frames ? frames : 1) * height * width, b;
    while ((b = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < batch)
        if (!solve_grid(channels + b * (2 * axes + 2) * N, frames, height, width, tolerance, max_iterations,
                        (int)members, y + b * axes * N, q + b * N, regions + b * N, out + b))
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
