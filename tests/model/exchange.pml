/* The exchange of src/antiphon/transport/protocol.py, for N learners that all may propose to each other.
 *
 * Each ordered pair (me, p) is one process; what it does in one turn is atomic, as in the code, except that adding a
 * difference takes a while, in which others act. A handler may die after any of its effects: that is the loss of what it
 * would still have sent, and a death right after. Deadlines pass at any moment; a frozen learner is one that takes no turn.
 * `silent` and `extend` only move moments, which here are arbitrary already.
 *
 * The network of the safety model is a set: what was sent may arrive at any later time, any number of times, in any
 * order, or never. So it holds every loss, full queue, double, delay and reordering at once, without a bound.
 * The liveness model (LIVE) has queues of 2 that lose what finds them full, and LOSSES further messages; its deadlines
 * are longer than a delivery.
 *
 * ROUNDS    exchanges that each learner may start, with whomever
 * KILLS     learners that are killed, at any moment
 * RETURNS   of them, how many come back as new processes, numbering above all that they used before
 * MISTAKES  times that a peer is given up for dead though it lives, as happens where the link to it is cut
 * BUG       a fault to plant, by its number below: each must be caught
 */
#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef RETURNS
#define RETURNS 0
#endif
#ifndef MISTAKES
#define MISTAKES 0
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef BUG
#define BUG 0
#endif

#define FORGETS_COMMITS 1        /* the initiator answers an acceptor in doubt with ABORT, whatever it decided */
#define TAKES_DOUBLES 2          /* the acceptor takes a COMMIT that it has seen before for a new one */
#define FREES_EARLY 3            /* the initiator lets its snapshot go at the deadline, without DONE */
#define DECIDES_ALONE 4          /* the acceptor in doubt gives up at the deadline */
#define FORGETS_PROPOSALS 5      /* a proposal that was seen before is taken for a new one */
#define WITHDRAWS_LATE 6         /* the acceptor withdraws though it has sent ACCEPT */
#define GIVES_WAY_COMMITTED 7    /* a proposal of the peer ends what this end has committed to */
#define ACCEPTS_MANY 8           /* several exchanges are accepted at a time */
#define STARTS_MANY 9            /* several exchanges are started at a time */
#define NUMBERS_AGAIN 10         /* a learner that returns numbers its exchanges from 1 again */
#define FORGETS_DEAD 11          /* what the old process has proposed is forgotten when the new one is there */
#define FORSAKES_SILENTLY 14      /* a COMMIT of what was given up gets no answer (a fault of liveness) */
#define NEVER_REPEATS 12         /* COMMIT is sent once only (a fault of liveness) */
#define NEVER_ASKS 13            /* the acceptor in doubt waits in silence (a fault of liveness) */

#define PROPOSE 0
#define ACCEPT 1
#define REFUSE 2
#define COMMIT 3
#define ABORT 4
#define DONE 5

#define FREE 0
#define PROPOSED 1
#define COMMITTED 2
#define HELD 3
#define WAITING 4                /* HELD, but the carrier keeps ACCEPT back until both snapshots are here whole */

#define TOP (ROUNDS * (1 + RETURNS))
#define AT(i, j) ((i) * N + (j))
#define BIT(k, q) (1 << ((k) * TOP + (q) - 1))

/* What each end knows of each peer: the exchange that is open, and the memory between exchanges. */
byte state[N * N], sequence[N * N];
bool fresh[N * N];
byte proposed[N * N], seen[N * N], committed[N * N], applied[N * N], forsaken[N * N];

byte started[N];                 /* proposals of this learner, of this process of it */
bool adding[N];                  /* the exchange thread is in the midst of adding a difference */
bool dead[N];
bool unaware[N * N];             /* unaware[me, p]: p's process died, and me has not noticed yet */
byte kills, returns, losses, mistakes, torn;
bool astray[N * N];              /* by (initiator, acceptor): an end of theirs was given up, so one may add alone */

/* What really happened, by (initiator, acceptor), a bit for each sequence number. */
byte added_out[N * N], added_in[N * N];

#ifdef LIVE
chan wire[N * N] = [2] of { byte, byte };
#define ARRIVING (nempty(wire[AT(p, me)]))
#define LATE (st != WAITING && !unaware[ours] && empty(wire[AT(p, me)]) && empty(wire[AT(me, p)]))
#else
int wire[N * N];
#define ARRIVING (wire[AT(p, me)] != 0)
#define HEARD(kind, n) :: (wire[AT(p, me)] & BIT(kind, n)) -> k = kind; q = n;
#define LATE true
#endif

#define st state[AT(me, p)]
#define sq sequence[AT(me, p)]
#define theirs AT(p, me)
#define ours AT(me, p)
#define HOLDS(s) (s == HELD || s == WAITING)

/* The peer's snapshot stays in its slot: its end of the very same exchange is open. A dead learner's stays as it was. */
#define PINNED(s) (dead[p] || unaware[ours] || astray[ours] || astray[theirs] || (state[theirs] == s && sequence[theirs] == sq))

#if N > 2
#define third (N - me - p)
#define STARTING (fresh[AT(me, third)] && (state[AT(me, third)] == PROPOSED || state[AT(me, third)] == COMMITTED))
#define ACCEPTING (fresh[AT(me, third)] && HOLDS(state[AT(me, third)]))
#define STALE(x) fresh[x] = false
#else
#define STARTING false
#define ACCEPTING false
#define STALE(x) skip            /* with one peer nothing else waits for the first deadline */
#endif

inline say(k, n) {
    if
    :: dead[p] || unaware[theirs] -> skip     /* no socket, or the peer still hears the process before this one */
    :: else ->
#ifdef LIVE
        if
        :: nfull(wire[ours]) -> wire[ours]!k,n
        :: full(wire[ours]) -> skip
        :: losses < LOSSES -> losses++
        fi
#else
        wire[ours] = wire[ours] | BIT(k, n)
#endif
    fi
}

inline hear() {
#ifdef LIVE
    wire[theirs]?k,q
#else
    if                                        /* any one of those in the set */
    HEARD(PROPOSE, 1) HEARD(ACCEPT, 1) HEARD(REFUSE, 1) HEARD(COMMIT, 1) HEARD(ABORT, 1) HEARD(DONE, 1)
#if TOP > 1
    HEARD(PROPOSE, 2) HEARD(ACCEPT, 2) HEARD(REFUSE, 2) HEARD(COMMIT, 2) HEARD(ABORT, 2) HEARD(DONE, 2)
#endif
#if TOP > 2
    HEARD(PROPOSE, 3) HEARD(ACCEPT, 3) HEARD(REFUSE, 3) HEARD(COMMIT, 3) HEARD(ABORT, 3) HEARD(DONE, 3)
#endif
#if TOP > 3
    HEARD(PROPOSE, 4) HEARD(ACCEPT, 4) HEARD(REFUSE, 4) HEARD(COMMIT, 4) HEARD(ABORT, 4) HEARD(DONE, 4)
#endif
    fi
#endif
}

inline over() { st = FREE; sq = 0; fresh[ours] = false }

inline give_up_held() {                       /* a held exchange that ends without COMMIT: then neither end has added it */
    assert(unaware[ours] || astray[theirs] || !(added_out[theirs] & (1 << (sq - 1))));
    over()
}

inline accept(n) {
    sq = n; fresh[ours] = true;
    if
    :: st = HELD; say(ACCEPT, n)
    :: st = WAITING
    fi
}

inline on_propose() {
    if
    :: q <= seen[ours] && !HOLDS(st) && BUG != FORGETS_PROPOSALS
    :: else ->
        if :: q > seen[ours] -> seen[ours] = q :: else fi;
        if
        :: HOLDS(st) && q == sq -> if :: st == HELD -> say(ACCEPT, q) :: else fi
        :: HOLDS(st) && q < sq
        :: st == COMMITTED && BUG != GIVES_WAY_COMMITTED -> say(COMMIT, sq); say(REFUSE, q)
        :: st == PROPOSED && me < p -> say(REFUSE, q)
        :: else ->
            if
            :: st == PROPOSED -> say(ABORT, sq); over()
            :: HOLDS(st) -> give_up_held()
            :: else -> over()
            fi;
            if
            :: !ACCEPTING || BUG == ACCEPTS_MANY -> accept(q)
            :: say(REFUSE, q)                 /* another one is held, or no snapshot can be taken */
            fi
        fi
    fi
}

inline on_accept() {
    if
    :: st == PROPOSED && sq == q ->
        if
        :: adding[me] = true                  /* goes on below, with others in between */
        :: say(ABORT, q); over()              /* the peer's snapshot cannot be used */
        fi
    :: else ->
        if
        :: committed[ours] == q && BUG != FORGETS_COMMITS -> say(COMMIT, q)
        :: else -> say(ABORT, q)
        fi
    fi
}

inline on_commit() {
    if
    :: HOLDS(st) && sq == q -> adding[me] = true
    :: else ->
        if
        :: applied[ours] == q ->
#if BUG == TAKES_DOUBLES
            assert(!(added_in[theirs] & (1 << (q - 1))))
#endif
            say(DONE, q)
        :: forsaken[ours] == q && BUG != FORSAKES_SILENTLY -> say(REFUSE, q)
        :: else
        fi
    fi
}

inline receive() {
    if
    :: k == PROPOSE -> on_propose()
    :: k == ACCEPT -> on_accept()
    :: k == COMMIT -> on_commit()
    :: k == ABORT -> if :: HOLDS(st) && sq == q -> give_up_held() :: else fi
    :: k == REFUSE ->
        if
        :: st == PROPOSED && sq == q -> over()
        :: st == COMMITTED && sq == q ->
            assert(unaware[ours] || astray[ours]);
            torn++; over()
        :: else
        fi
    :: k == DONE ->
        if
        :: st == COMMITTED && sq == q ->
            assert(unaware[ours] || (added_in[ours] & (1 << (q - 1))));
            over()
        :: else
        fi
    fi
}

inline add() {                                /* both ends add the difference of the same two snapshots, each once */
    if
    :: st == PROPOSED ->
        assert(PINNED(HELD));
        assert(!(added_out[ours] & (1 << (sq - 1))));
        added_out[ours] = added_out[ours] | (1 << (sq - 1));
        st = COMMITTED; committed[ours] = sq;
        say(COMMIT, sq)
    :: else ->
        assert(PINNED(COMMITTED));
        assert(unaware[ours] || (added_out[theirs] & (1 << (sq - 1))));
        assert(!(added_in[theirs] & (1 << (sq - 1))));
        added_in[theirs] = added_in[theirs] | (1 << (sq - 1));
        applied[ours] = sq;
        say(DONE, sq);
        over()
    fi
}

inline deadline() {
    if
    :: st == PROPOSED -> say(ABORT, sq); over()
    :: st == COMMITTED -> STALE(ours);
#if BUG == FREES_EARLY
        over()
#elif BUG != NEVER_REPEATS
        say(COMMIT, sq)
#endif
    :: st == HELD -> STALE(ours);
#if BUG == DECIDES_ALONE
        give_up_held()
#elif BUG != NEVER_ASKS
        say(ACCEPT, sq)
#endif
    :: st == WAITING -> STALE(ours)
    fi
}

inline die() {
    kills++; dead[me] = true; adding[me] = false;
    for (x : 0 .. N - 1) {
        if
        :: x != me ->
            state[AT(me, x)] = FREE; sequence[AT(me, x)] = 0; fresh[AT(me, x)] = false;
            seen[AT(me, x)] = 0; committed[AT(me, x)] = 0; applied[AT(me, x)] = 0; forsaken[AT(me, x)] = 0;
            unaware[AT(me, x)] = false;
            unaware[AT(x, me)] = !dead[x];
#ifdef LIVE
            do :: nempty(wire[AT(x, me)]) -> wire[AT(x, me)]?_,_ :: empty(wire[AT(x, me)]) -> break od
#else
            wire[AT(x, me)] = 0               /* its sockets went with it */
#endif
        :: else
        fi
    }
    x = 0
}

inline lost() {
    if
    :: st == COMMITTED -> torn++; over()
    :: HOLDS(st) -> forsaken[ours] = sq; over()
    :: else -> over()
    fi
}

inline notice() {                             /* lost(p), and returned(p) where there is a new process */
    unaware[ours] = false;
    lost();
    committed[ours] = 0
#if BUG == FORGETS_DEAD
    ; seen[ours] = 0; applied[ours] = 0
#endif
#ifdef LIVE
    ; do :: nempty(wire[theirs]) -> wire[theirs]?_,_ :: empty(wire[theirs]) -> break od  /* the dead are not heard */
#endif
}

proctype end(byte me; byte p) {
    byte k, q, x;
end_idle:
    do
    :: atomic { !dead[me] && !adding[me] && !unaware[ours] && st == FREE && started[me] < ROUNDS &&
                (!STARTING || BUG == STARTS_MANY) ->
            started[me]++; proposed[ours]++;
            sq = proposed[ours]; st = PROPOSED; fresh[ours] = true;
            say(PROPOSE, sq) }
    :: atomic { !dead[me] && !adding[me] && ARRIVING -> hear(); receive(); k = 0; q = 0;
            if :: adding[me] -> goto busy :: else fi }
    :: atomic { !dead[me] && !adding[me] && st != FREE && LATE -> deadline() }
    :: atomic { !dead[me] && !adding[me] && st == WAITING -> st = HELD; say(ACCEPT, sq) }
    :: atomic { !dead[me] && !adding[me] && (st == WAITING || (st == HELD && BUG == WITHDRAWS_LATE)) ->
            say(REFUSE, sq); give_up_held() }
    :: atomic { !dead[me] && !adding[me] && unaware[ours] -> notice() }
    :: atomic { !dead[me] && !adding[me] && st != FREE && !dead[p] && !unaware[ours] && mistakes < MISTAKES ->
            mistakes++; astray[ours] = true; astray[theirs] = true; lost() }
    :: atomic { !dead[me] && !adding[me] && kills < KILLS && p == (me + 1) % N -> die() }
    :: atomic { dead[me] && returns < RETURNS && p == (me + 1) % N -> returns++; dead[me] = false; started[me] = 0;
#if BUG == NUMBERS_AGAIN
            proposed[ours] = 0
#endif
            }
    od;
busy:
    atomic {
        if
        :: !dead[me] -> add(); adding[me] = false
        :: kills < KILLS -> die()
        fi
    };
    goto end_idle
}

/* One exchange started and one accepted by a learner at a time, of those within their first deadline. */
#define FRESH(i, j, s) (fresh[AT(i, j)] && state[AT(i, j)] == s)
#define STARTS(i, j) (FRESH(i, j, PROPOSED) || FRESH(i, j, COMMITTED))
#define ACCEPTS(i, j) (FRESH(i, j, HELD) || FRESH(i, j, WAITING))
#if N > 2
active proctype limits() {
end_limits:
    atomic {
        (STARTS(0, 1) && STARTS(0, 2)) || (STARTS(1, 0) && STARTS(1, 2)) || (STARTS(2, 0) && STARTS(2, 1)) ||
        (ACCEPTS(0, 1) && ACCEPTS(0, 2)) || (ACCEPTS(1, 0) && ACCEPTS(1, 2)) || (ACCEPTS(2, 0) && ACCEPTS(2, 1)) ->
        assert(false)
    }
}
#endif

init {
    atomic {
        byte i, j;
        for (i : 0 .. N - 1) {
            for (j : 0 .. N - 1) {
                if :: i != j -> run end(i, j) :: else fi
            }
        }
    }
}

#ifdef LIVE
#define OVER(i, j) (dead[i] || state[AT(i, j)] == FREE)
#if N == 2
#define ALL_OVER (OVER(0, 1) && OVER(1, 0))
#else
#define ALL_OVER (OVER(0, 1) && OVER(1, 0) && OVER(0, 2) && OVER(2, 0) && OVER(1, 2) && OVER(2, 1))
#endif
ltl ends { <>[] ALL_OVER }
#endif
