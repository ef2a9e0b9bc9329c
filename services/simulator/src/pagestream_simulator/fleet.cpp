// Engines that share a queue, event by event: the rules of the engine's scheduler, the worker's claims and the queue,
// with the duration of a step computed. fleet.py describes the model and is the only caller.
//
// Times are seconds. Requests are numbered by arrival, engines by the order in which they were added.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <queue>
#include <random>
#include <vector>

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Profile {
    double fixed_s, prefill_token_s, prefill_pair_s, decode_s, decode_context_s;
    int64_t kv_blocks, block_size, max_num_seqs, max_num_batched_tokens, claim_tokens;
    int64_t reserve_share;  // a sequence is admitted if a block per this many running ones stays free
};

struct Request {
    double arrival_s;
    int prompt, output, partition, expected;  // expected: output tokens, as a gateway would expect them
    int generated = 0;
    double queued_s = 0;  // when it entered the queue
};

struct Sequence {
    int request;
    int64_t rank;  // order of arrival at this engine
    int length;    // tokens that it has: prompt and generated
    int computed = 0;
    int blocks = 0;
    int chunk = 0;           // tokens of the running step
    bool has_output = false;  // since it was claimed
};

struct EngineStats {
    double kv_used_blocks, running, waiting, prompt_tokens, generated_tokens, preemptions, busy_s, gone_s;
};

struct QueueStats {
    double depth, tokens, oldest_s, running, claimed_tokens, expected_output;
};

enum class Kind { kReady, kStepEnd, kSteal };

struct Event {
    double time;
    int64_t order;
    Kind kind;
    int id;
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
};

struct Engine {
    bool ready = false, draining = false, stepping = false;
    size_t in_step = 0;  // decodes of the running step
    double gone_s = kNever;
    int64_t free_blocks = 0, next_rank = 0, claimed = 0, promised_tokens = 0, preempted_tokens = 0;
    std::map<int64_t, Sequence> waiting;  // by rank
    std::vector<Sequence> prefills, decodes;
    double prompt_tokens = 0, generated_tokens = 0, preemptions = 0, busy_s = 0;
};

uint64_t mixed(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

class Fleet {
  public:
    Fleet(const Profile& profile, int64_t count, const double* arrival, const int32_t* prompt, const int32_t* output,
          const int32_t* partition, const int32_t* expected, int partitions, double steal_s, double slack_s,
          uint64_t seed, double* first_s, double* end_s)
        : profile_(profile), steal_s_(steal_s), slack_s_(slack_s), seed_(seed), random_(seed), fresh_(partitions), resumed_(partitions),
          owner_(partitions, -1), first_s_(first_s), end_s_(end_s) {
        requests_.reserve(count);
        for (int64_t i = 0; i < count; ++i) {
            requests_.push_back({arrival[i], prompt[i], output[i], partition[i], expected[i]});
            first_s_[i] = end_s_[i] = kNever;
        }
    }

    int add_engine(double ready_s) {
        engines_.emplace_back();
        engines_.back().free_blocks = profile_.kv_blocks;
        push(std::max(ready_s, now_), Kind::kReady, static_cast<int>(engines_.size()) - 1);
        return static_cast<int>(engines_.size()) - 1;
    }

    void drain(int id) {
        Engine& engine = engines_[id];
        if (engine.draining) return;
        engine.draining = true;
        settle_owners();
        if (!engine.stepping) hand_back(id);
    }

    bool advance(double until) {
        while (true) {
            double arrival = next_ < requests_.size() ? requests_[next_].arrival_s : kNever;
            double event = events_.empty() ? kNever : events_.top().time;
            double next = std::min(arrival, event);
            if (next > until || next == kNever) break;
            if (arrival <= event) {
                now_ = arrival;
                arrive(static_cast<int>(next_++));
            } else {
                Event first = events_.top();
                events_.pop();
                now_ = first.time;
                happen(first);
            }
        }
        if (until < kNever) now_ = std::max(now_, until);
        return finished_ == requests_.size();
    }

    void stats(int id, EngineStats* out) const {
        const Engine& e = engines_[id];
        *out = {static_cast<double>(profile_.kv_blocks - e.free_blocks),
                static_cast<double>(e.prefills.size() + e.decodes.size()), static_cast<double>(e.waiting.size()),
                e.prompt_tokens, e.generated_tokens, e.preemptions, e.busy_s, e.gone_s};
    }

    void queue(QueueStats* out) const {
        double oldest = kNever;
        for (const auto* queues : {&fresh_, &resumed_})
            for (const auto& each : *queues)
                if (!each.empty()) oldest = std::min(oldest, requests_[each.front()].queued_s);
        double owned = 0;
        for (const Engine& e : engines_) owned += static_cast<double>(e.claimed);
        *out = {static_cast<double>(depth_), static_cast<double>(queued_tokens_), oldest, owned, claimed_tokens_,
                static_cast<double>(expected_output_)};
    }

    int64_t num_first() const { return static_cast<int64_t>(firsts_.size()); }
    void firsts(int64_t from, int32_t* out) const { std::copy(firsts_.begin() + from, firsts_.end(), out); }

  private:
    void push(double time, Kind kind, int id) { events_.push({time, order_++, kind, id}); }

    void happen(const Event& event) {
        if (event.kind == Kind::kReady) {
            Engine& engine = engines_[event.id];
            if (engine.draining) return;
            engine.ready = true;
            settle_owners();
            claim(event.id);
            begin_step(event.id);
        } else if (event.kind == Kind::kStepEnd) {
            end_step(event.id);
        } else {
            offer(event.id);
        }
    }

    // -- the queue --

    void arrive(int id) {
        requests_[id].queued_s = now_;
        fresh_[requests_[id].partition].push_back(id);
        enqueue(id);
    }

    void enqueue(int id) {
        const Request& request = requests_[id];
        ++depth_;
        queued_tokens_ += request.prompt;
        if (!request.generated) expected_output_ += request.expected;
        int owner = owner_[request.partition];
        if (owner >= 0) {
            claim(owner);
            begin_step(owner);
        }
        if (!fresh_[request.partition].empty() || !resumed_[request.partition].empty())
            push(now_ + steal_s_, Kind::kSteal, request.partition);
    }

    // Offer entries that the partition's owner has left for steal_s to all engines, from a random one on.
    void offer(int partition) {
        if (head(partition, steal_s_) < 0 || engines_.empty()) return;
        size_t first = random_() % engines_.size();
        for (size_t i = 0; i < engines_.size() && head(partition, steal_s_) >= 0; ++i) {
            int id = static_cast<int>((first + i) % engines_.size());
            claim(id);
            begin_step(id);
        }
    }

    // The request at the head of a partition's queues if it has waited at least least_age; else -1.
    int head(int partition, double least_age) const {
        for (const auto* queues : {&resumed_, &fresh_}) {
            const auto& waiting = (*queues)[partition];
            if (!waiting.empty() && now_ - requests_[waiting.front()].queued_s >= least_age - 1e-9)
                return waiting.front();
        }
        return -1;
    }

    void settle_owners() {
        for (size_t partition = 0; partition < owner_.size(); ++partition) {
            uint64_t best = 0;
            owner_[partition] = -1;
            for (size_t id = 0; id < engines_.size(); ++id) {
                if (!engines_[id].ready || engines_[id].draining) continue;
                uint64_t weight = mixed(mixed(seed_ + id) ^ partition);
                if (owner_[partition] < 0 || weight > best) {
                    best = weight;
                    owner_[partition] = static_cast<int>(id);
                }
            }
        }
    }

    // Claim the earliest requests over all partitions, begun ones first. Those of other engines' partitions count once
    // they have waited for steal_s; of what was queued within slack_s the engine's own come first.
    void claim(int id) {
        Engine& engine = engines_[id];
        if (!engine.ready || engine.draining) return;
        std::vector<bool> too_large(owner_.size());
        while (depth_) {
            int chosen = earliest(id, resumed_, too_large);
            bool begun = chosen >= 0;
            if (!begun) chosen = earliest(id, fresh_, too_large);
            if (chosen < 0) return;
            auto& waiting = begun ? resumed_[chosen] : fresh_[chosen];
            int next = waiting.front();
            if (!fits(engine, next)) {
                if (is_full(engine)) return;
                too_large[chosen] = true;
                continue;
            }
            waiting.pop_front();
            take(engine, next);
        }
    }

    // The partition whose queue has the head that an engine claims next; -1: none that it may claim.
    int earliest(int id, const std::vector<std::deque<int>>& queues, const std::vector<bool>& too_large) const {
        int first = -1, own = -1;
        auto queued = [&](int partition) { return requests_[queues[partition].front()].queued_s; };
        for (int partition = 0; partition < static_cast<int>(owner_.size()); ++partition) {
            if (queues[partition].empty() || too_large[partition]) continue;
            bool is_own = owner_[partition] == id;
            if (!is_own && now_ - queued(partition) < steal_s_ - 1e-9) continue;
            if (first < 0 || queued(partition) < queued(first)) first = partition;
            if (is_own && (own < 0 || queued(partition) < queued(own))) own = partition;
        }
        return own >= 0 && queued(own) <= queued(first) + slack_s_ ? own : first;
    }

    bool is_full(const Engine& engine) const {
        return engine.claimed >= profile_.max_num_seqs || engine.promised_tokens >= profile_.claim_tokens;
    }

    // An idle engine takes a request of any size; another what fits into its free blocks beside the promised ones, until
    // it holds as many uncomputed tokens as one step takes.
    bool fits(const Engine& engine, int request) const {
        if (!engine.claimed) return true;
        if (is_full(engine)) return false;
        // The blocks that admission keeps free for the growth of running sequences.
        int64_t kept = (engine.claimed + profile_.reserve_share - 1) / profile_.reserve_share;
        int64_t free = (engine.free_blocks - kept) * profile_.block_size;
        return requests_[request].prompt <= free - engine.promised_tokens - engine.preempted_tokens;
    }

    void take(Engine& engine, int id) {
        Request& request = requests_[id];
        --depth_;
        queued_tokens_ -= request.prompt;
        if (!request.generated) expected_output_ -= request.expected;
        if (!request.generated) claimed_tokens_ += request.prompt;
        ++engine.claimed;
        int64_t rank = engine.next_rank++;
        engine.waiting.emplace(rank, Sequence{id, rank, request.prompt + request.generated});
        engine.promised_tokens += request.prompt + request.generated;
    }

    void hand_back(int id) {
        Engine& engine = engines_[id];
        std::vector<int> held;
        for (const auto& [rank, seq] : engine.waiting) held.push_back(seq.request);
        for (const auto* set : {&engine.prefills, &engine.decodes})
            for (const Sequence& seq : *set) held.push_back(seq.request);
        engine.waiting.clear();
        engine.prefills.clear();
        engine.decodes.clear();
        engine.free_blocks = profile_.kv_blocks;
        engine.claimed = engine.promised_tokens = engine.preempted_tokens = 0;
        engine.ready = false;
        engine.gone_s = now_;
        std::sort(held.begin(), held.end());
        for (int each : held) {
            requests_[each].queued_s = now_;
            resumed_[requests_[each].partition].push_back(each);
        }
        for (int each : held) enqueue(each);
    }

    // -- steps --

    int64_t blocks_for(int64_t tokens) const { return (tokens + profile_.block_size - 1) / profile_.block_size; }

    void begin_step(int id) {
        Engine& engine = engines_[id];
        if (engine.stepping || !engine.ready || !engine.claimed) return;
        bool preempted = make_room(engine);
        int64_t tokens = 0, pairs = 0, context = 0;
        for (Sequence& seq : engine.decodes) context += seq.computed + 1;
        size_t decodes = engine.decodes.size();
        int64_t budget = profile_.max_num_batched_tokens - static_cast<int64_t>(decodes);
        auto chunk = [&](Sequence& seq) {
            int64_t covered = (seq.blocks + engine.free_blocks) * profile_.block_size;
            int64_t size = std::max<int64_t>(0, std::min({static_cast<int64_t>(seq.length - seq.computed), budget,
                                                          covered - seq.computed}));
            seq.chunk = static_cast<int>(size);
            int64_t more = std::max<int64_t>(0, blocks_for(seq.computed + size) - seq.blocks);
            seq.blocks += static_cast<int>(more);
            engine.free_blocks -= more;
            tokens += size;
            pairs += size * seq.computed + size * (size + 1) / 2;
            budget -= size;
        };
        for (Sequence& seq : engine.prefills) chunk(seq);
        if (!preempted) admit(engine, budget, chunk);
        engine.stepping = true;
        double seconds = profile_.fixed_s + profile_.prefill_token_s * static_cast<double>(tokens) +
                         profile_.prefill_pair_s * static_cast<double>(pairs) +
                         profile_.decode_s * static_cast<double>(decodes) +
                         profile_.decode_context_s * static_cast<double>(context);
        engine.in_step = decodes;
        engine.busy_s += seconds;
        engine.prompt_tokens += static_cast<double>(tokens);
        push(now_ + seconds, Kind::kStepEnd, id);
    }

    template <typename Chunk>
    void admit(Engine& engine, int64_t& budget, Chunk& chunk) {
        int64_t promised = 0;
        for (const Sequence& seq : engine.prefills) promised += std::max<int64_t>(0, blocks_for(seq.length) - seq.blocks);
        while (budget > 0 && !engine.waiting.empty()) {
            int64_t running = static_cast<int64_t>(engine.prefills.size() + engine.decodes.size());
            if (running >= profile_.max_num_seqs) return;
            auto first = engine.waiting.begin();
            int64_t wanted = promised + blocks_for(first->second.length);
            if (running && wanted + (running + profile_.reserve_share - 1) / profile_.reserve_share > engine.free_blocks) return;
            if (first->second.has_output) engine.preempted_tokens -= first->second.length;
            engine.prefills.push_back(first->second);
            engine.waiting.erase(first);
            int64_t before = engine.free_blocks;
            chunk(engine.prefills.back());
            promised = wanted - (before - engine.free_blocks);
        }
    }

    // Allocate a block for every decode that needs one for its next token; preempt the latest sequences until all fit.
    bool make_room(Engine& engine) {
        auto at_border = [&](const Sequence& seq) { return seq.computed == seq.blocks * profile_.block_size; };
        bool preempted = false;
        while (std::count_if(engine.decodes.begin(), engine.decodes.end(), at_border) > engine.free_blocks) {
            preempted = true;
            preempt_last(engine);
        }
        for (Sequence& seq : engine.decodes)
            if (at_border(seq)) {
                ++seq.blocks;
                --engine.free_blocks;
            }
        return preempted;
    }

    void preempt_last(Engine& engine) {
        auto by_rank = [](const Sequence& a, const Sequence& b) { return a.rank < b.rank; };
        auto prefill = std::max_element(engine.prefills.begin(), engine.prefills.end(), by_rank);
        auto decode = std::max_element(engine.decodes.begin(), engine.decodes.end(), by_rank);
        bool of_prefills = decode == engine.decodes.end() ||
                           (prefill != engine.prefills.end() && prefill->rank > decode->rank);
        auto& set = of_prefills ? engine.prefills : engine.decodes;
        auto last = of_prefills ? prefill : decode;
        engine.free_blocks += last->blocks;
        last->blocks = last->computed = last->chunk = 0;
        if (last->has_output) engine.preempted_tokens += last->length;  // what has none is promised still
        engine.waiting.emplace(last->rank, *last);
        set.erase(last);
        ++engine.preemptions;
    }

    void end_step(int id) {
        Engine& engine = engines_[id];
        engine.stepping = false;
        size_t decodes = engine.in_step, kept = 0;
        for (size_t i = 0; i < decodes; ++i) {
            Sequence& seq = engine.decodes[i];
            ++seq.computed;
            if (!give_token(engine, seq)) engine.decodes[kept++] = seq;
        }
        engine.decodes.resize(kept);
        kept = 0;
        for (Sequence& seq : engine.prefills) {
            seq.computed += seq.chunk;
            seq.chunk = 0;
            if (seq.computed < seq.length)
                engine.prefills[kept++] = seq;
            else if (!give_token(engine, seq))
                engine.decodes.push_back(seq);
        }
        engine.prefills.resize(kept);
        if (engine.draining) {
            hand_back(id);
            return;
        }
        begin_step(id);  // the next step starts before the claim: what is claimed meanwhile is scheduled a step later
        claim(id);
        begin_step(id);
    }

    // Count a token of a sequence; return whether it was the last one, which releases the sequence.
    bool give_token(Engine& engine, Sequence& seq) {
        Request& request = requests_[seq.request];
        ++engine.generated_tokens;
        if (!request.generated++) {
            first_s_[seq.request] = now_;
            firsts_.push_back(seq.request);
        }
        if (!seq.has_output) {
            seq.has_output = true;
            engine.promised_tokens -= seq.length;
        }
        ++seq.length;
        if (request.generated < request.output) return false;
        end_s_[seq.request] = now_;
        engine.free_blocks += seq.blocks;
        --engine.claimed;
        ++finished_;
        return true;
    }

    Profile profile_;
    double steal_s_, slack_s_;
    uint64_t seed_;
    std::mt19937_64 random_;
    std::vector<Request> requests_;
    std::vector<std::deque<int>> fresh_, resumed_;  // by partition
    std::vector<int> owner_;                        // by partition; -1 without a ready engine
    std::deque<Engine> engines_;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    std::vector<int32_t> firsts_;  // requests in the order of their first tokens
    double *first_s_, *end_s_;
    double now_ = 0, claimed_tokens_ = 0;
    int64_t order_ = 0, depth_ = 0, queued_tokens_ = 0, expected_output_ = 0;
    size_t next_ = 0, finished_ = 0;
};

}  // namespace

extern "C" {

Fleet* fleet_new(const Profile* profile, int64_t count, const double* arrival, const int32_t* prompt,
                 const int32_t* output, const int32_t* partition, const int32_t* expected, int32_t partitions,
                 double steal_s, double slack_s, uint64_t seed, double* first_s, double* end_s) {
    return new Fleet(*profile, count, arrival, prompt, output, partition, expected, partitions, steal_s, slack_s, seed,
                     first_s, end_s);
}
void fleet_free(Fleet* fleet) { delete fleet; }
int32_t fleet_add_engine(Fleet* fleet, double ready_s) { return fleet->add_engine(ready_s); }
void fleet_drain(Fleet* fleet, int32_t engine) { fleet->drain(engine); }
int32_t fleet_advance(Fleet* fleet, double until) { return fleet->advance(until); }
void fleet_stats(const Fleet* fleet, int32_t engine, EngineStats* out) { fleet->stats(engine, out); }
void fleet_queue(const Fleet* fleet, QueueStats* out) { fleet->queue(out); }
int64_t fleet_num_first(const Fleet* fleet) { return fleet->num_first(); }
void fleet_firsts(const Fleet* fleet, int64_t from, int32_t* out) { fleet->firsts(from, out); }

}  // extern "C"
